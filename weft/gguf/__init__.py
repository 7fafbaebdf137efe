"""Models in GGUF files (llama.cpp), presented as the folder of a checkpoint. No torch.

``checkpoint_folder`` makes the folder: config.json, tokenizer.json and other small files from the file's
metadata (``config``, ``gguf_tokenizer``), and a link to the weights. Tensors get their published names
(``gguf_names``). After the folder is made, only ``weft.models.files`` reads the format (``container``).
"""
