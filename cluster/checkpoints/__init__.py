"""Published checkpoints: where a model is found, in which form its weights are, and how they are read.

    hub             a model's name -> a folder; weights and headers of a Hugging Face hub
    weight_files    the files of a safetensors checkpoint, which tensor is in which, and their headers
    gguf_header     the headers of GGUF files; gguf_files, gguf_config, gguf_tokenizer: what the headers say
    quantization    what config.json says of quantized weights
    matrices        the tensors of one quantized matrix -> its `kernels.forms.MatrixForm`
    checkpoint      `open_checkpoint`: all tensors of a folder, plain and quantized; no weight is read
    plan, gguf_plan which tensors make which parameter of the model (these import torch)
    generation      defaults of sampling that a checkpoint publishes
    experts         the routed experts of a layer in their published form

A new published form starts in `kernels/forms.py` (values and bytes), then `quantization` (what the configuration says)
and `matrices` (which tensors). `jobs/prepare` converts what is opened here into a store; `actors/store/published.py`
maps experts that stay in the checkpoint.
"""
