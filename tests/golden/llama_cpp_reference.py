"""llama.cpp as a reference: token ids and logits of a GGUF file, through the ctypes declarations of `llama-cpp-python` (LLAMA_CPP_LIB_PATH names the folder of
libllama.so where it is not the package's own). Its defaults: keys and values in f16, products on quantised activations."""

import ctypes

import llama_cpp as api
import numpy as np


@api.llama_log_callback
def _silent(level, text, data):
    pass


class Model:
    """One file, with one context of `context` tokens."""

    def __init__(self, path, context=1024, threads=1):
        api.llama_log_set(_silent, None)
        api.llama_backend_init()
        self.model = api.llama_model_load_from_file(str(path).encode(), api.llama_model_default_params())
        if not self.model:
            raise SystemExit(f"{path}: llama.cpp does not load it")
        params = api.llama_context_default_params()
        params.n_ctx = params.n_batch = params.n_ubatch = context
        params.n_threads = params.n_threads_batch = threads
        self.context = api.llama_init_from_model(self.model, params)
        self.vocab = api.llama_model_get_vocab(self.model)
        self.vocabulary = api.llama_vocab_n_tokens(self.vocab)
        self.batch = api.llama_batch_init(context, 0, 1)
        self.fed = 0

    def adds_bos(self):
        return bool(api.llama_vocab_get_add_bos(self.vocab))

    def bos(self):
        return api.llama_vocab_bos(self.vocab)

    def tokens(self, text):
        """Ids of a text, special tokens parsed, nothing added."""
        data = text.encode()
        ids = (api.llama_token * (len(data) + 8))()
        n = api.llama_tokenize(self.vocab, data, len(data), ids, len(ids), False, True)
        return list(ids[:n])

    def clear(self):
        api.llama_memory_clear(api.llama_get_memory(self.context), True)
        self.fed = 0

    def feed(self, ids, all_rows=False):
        """Logits `[rows, vocabulary]` after these tokens: of the last alone, or of each."""
        for i, token in enumerate(ids):
            self.batch.token[i] = token
            self.batch.pos[i] = self.fed + i
            self.batch.n_seq_id[i] = 1
            self.batch.seq_id[i][0] = 0
            self.batch.logits[i] = all_rows or i + 1 == len(ids)
        self.batch.n_tokens = len(ids)
        if api.llama_decode(self.context, self.batch) != 0:
            raise SystemExit("llama.cpp failed to compute a batch")
        self.fed += len(ids)
        rows = len(ids) if all_rows else 1
        pointer = ctypes.cast(api.llama_get_logits(self.context), ctypes.POINTER(ctypes.c_float))
        return np.ctypeslib.as_array(pointer, (rows, self.vocabulary)).copy()
