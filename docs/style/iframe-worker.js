// Search in a site that is opened from a folder. Browsers refuse workers of file: pages, so the script of the worker
// runs in a hidden frame. The name of this file keeps mkdocs-material from adding a script of another host.
if (location.protocol === "file:") {
  window.IFrameWorker = window.Worker = class extends EventTarget {
    constructor(url) {
      super();
      const frame = document.createElement("iframe");
      frame.hidden = true;
      document.body.append(frame);
      this.inner = frame.contentWindow;
      // The worker answers by its global function postMessage.
      this.inner.postMessage = data => this.dispatchEvent(new MessageEvent("message", { data }));
      const script = this.inner.document.createElement("script");
      script.src = url;
      // Messages wait until the script listens.
      this.loaded = new Promise(done => script.addEventListener("load", done));
      this.inner.document.body.append(script);
    }
    postMessage(data) {
      this.loaded.then(() => this.inner.dispatchEvent(new MessageEvent("message", { data })));
    }
    terminate() {}
  };
}
