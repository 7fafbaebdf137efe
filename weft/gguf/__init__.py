"""Models in one GGUF file, as llama.cpp has them: read as the folder of a checkpoint. No torch.

``folder`` makes that folder: config.json, tokenizer.json and the other small files from the file's metadata
(``config``, ``tokenizer``), and a link to the weights, whose tensors go by their published names (``names``).
From there on nothing knows of the format but ``weft.models.files``, which reads the tensors (``container``).
"""
