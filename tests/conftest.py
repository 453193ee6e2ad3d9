"""Set before anything imports torch or triton."""

import os
import warnings

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "true")

import torch

torch.set_num_threads(1)  # the models are tiny: a second thread only costs
if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")

warnings.filterwarnings("ignore", category=DeprecationWarning, module="gguf")
