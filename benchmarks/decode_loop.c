// The shortest timed decode over llama.h, to compare the benchmark's figures with: a prompt, then one token at a time, all
// of consecutive ids.
//   decode_loop LIBRARIES MODEL N_CPU_MOE LOAD_MODE N_THREADS N_UBATCH N_WARM FIRST N_PROMPT N_GEN
// LIBRARIES: folder with the CUDA backend, if there is one; N_CPU_MOE: layers whose experts are in RAM, -1 = all;
// LOAD_MODE: mmap, copy, repack; N_WARM: ids from 0 on, evaluated before in a pass and 16 single tokens; FIRST: the first
// id that is timed. Prints the seconds of the prompt and of all the other tokens.
#include "ggml-backend.h"
#include "llama.h"
#include "loop.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#define MAX_LAYERS 512
#define N_SINGLE 16

static const char * const EXPERTS = "ffn_(up|down|gate|gate_up)_(ch|)exps";

static void fail(const char * what) {
    fprintf(stderr, "decode_loop: %s\n", what);
    exit(1);
}

// Evaluates n ids from first on, so many at a time; returns the seconds until the last is done.
static double evaluate(struct llama_context * ctx, int first, int n, int at_a_time) {
    const int n_vocab = llama_vocab_n_tokens(llama_model_get_vocab(llama_get_model(ctx)));
    llama_token * ids = malloc((size_t) at_a_time * sizeof(llama_token));
    const double start = now();
    for (int at = 0; at < n; at += at_a_time) {
        const int part = n - at < at_a_time ? n - at : at_a_time;
        for (int i = 0; i < part; i++) {
            ids[i] = (first + at + i) % n_vocab;
        }
        if (llama_decode(ctx, llama_batch_get_one(ids, part))) {
            fail("llama_decode failed");
        }
        llama_synchronize(ctx);
    }
    free(ids);
    return now() - start;
}

int main(int argc, char ** argv) {
    if (argc != 11) {
        fail("ten arguments are needed");
    }
    const char * load_mode = argv[4];
    const int n_cpu_moe = atoi(argv[3]), n_threads = atoi(argv[5]), n_ubatch = atoi(argv[6]), n_warm = atoi(argv[7]);
    const int first = atoi(argv[8]), n_prompt = atoi(argv[9]), n_gen = atoi(argv[10]);

    llama_log_set(quiet, NULL);
    char cuda[4096];
    snprintf(cuda, sizeof(cuda), "%s/libphx-ggml-cuda.so", argv[1]);
    if (access(cuda, R_OK) == 0 && !ggml_backend_load(cuda)) {
        fail("the CUDA backend cannot be loaded");
    }
    if (!ggml_backend_dev_by_type(GGML_BACKEND_DEVICE_TYPE_CPU)) {
        ggml_backend_load_all_from_path(argv[1]);
    }
    llama_backend_init();

    static char patterns[MAX_LAYERS][64];
    static struct llama_model_tensor_buft_override overrides[MAX_LAYERS + 1];
    if (n_cpu_moe < -1 || n_cpu_moe > MAX_LAYERS) {
        fail("too many layers");
    }
    for (int i = 0; i < (n_cpu_moe < 0 ? 1 : n_cpu_moe); i++) {
        if (n_cpu_moe < 0) {
            snprintf(patterns[i], sizeof(patterns[i]), "\\.%s", EXPERTS);
        } else {
            snprintf(patterns[i], sizeof(patterns[i]), "blk\\.%d\\.%s", i, EXPERTS);
        }
        overrides[i].pattern = patterns[i];
        overrides[i].buft = ggml_backend_cpu_buffer_type();
    }
    struct llama_model_params model_params = llama_model_default_params();
    model_params.tensor_buft_overrides = overrides;
    model_params.load_mode = strcmp(load_mode, "mmap") == 0 ? LLAMA_LOAD_MODE_MMAP : LLAMA_LOAD_MODE_NONE;
    model_params.no_host = strcmp(load_mode, "repack") == 0;
    struct llama_model * model = llama_model_load_from_file(argv[2], model_params);
    if (!model) {
        fail("the model cannot be loaded");
    }

    struct llama_context_params params = llama_context_default_params();
    params.n_ctx = (uint32_t) (n_prompt + n_gen + 64 + 255) / 256 * 256;
    params.n_batch = params.n_ubatch = (uint32_t) n_ubatch;
    params.n_threads = params.n_threads_batch = n_threads;
    params.flash_attn_type = LLAMA_FLASH_ATTN_TYPE_ENABLED;
    params.no_perf = true;
    struct llama_context * ctx = llama_init_from_model(model, params);
    if (!ctx) {
        fail("no context can be made");
    }

    evaluate(ctx, 0, n_warm, n_ubatch);
    evaluate(ctx, n_warm, N_SINGLE, 1);
    llama_memory_clear(llama_get_memory(ctx), true);
    const double prompt = evaluate(ctx, first, n_prompt, n_ubatch);
    const double generated = evaluate(ctx, first + n_prompt, n_gen, 1);
    printf("%.6f %.6f\n", prompt, generated);
    llama_free(ctx);
    llama_model_free(model);
    return 0;
}
