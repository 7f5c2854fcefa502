// The shortest greedy generation over llama.h, to compare Model.generate with: prompt, then one token at a time.
//   greedy_loop MODEL PROMPT N_TOKENS N_THREADS N_CTX
// Prints the tokens on one line, then the seconds for all but the first of them.
#include "llama.h"
#include "loop.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

int main(int argc, char ** argv) {
    if (argc != 6) {
        return 2;
    }
    const int n_tokens = atoi(argv[3]);
    llama_log_set(quiet, NULL);
    llama_backend_init();
    struct llama_model * model = llama_model_load_from_file(argv[1], llama_model_default_params());
    if (!model) {
        return 1;
    }
    struct llama_context_params params = llama_context_default_params();
    params.n_ctx = (uint32_t) atoi(argv[5]);
    params.n_threads = params.n_threads_batch = atoi(argv[4]);
    params.no_perf = true;
    struct llama_context * ctx = llama_init_from_model(model, params);
    struct llama_sampler_chain_params chain_params = llama_sampler_chain_default_params();
    chain_params.no_perf = true;
    struct llama_sampler * sampler = llama_sampler_chain_init(chain_params);
    llama_sampler_chain_add(sampler, llama_sampler_init_greedy());

    const struct llama_vocab * vocab = llama_model_get_vocab(model);
    llama_token * tokens = malloc((strlen(argv[2]) + 16) * sizeof(llama_token));
    const int n_prompt = llama_tokenize(vocab, argv[2], (int) strlen(argv[2]), tokens, (int) strlen(argv[2]) + 16, true, false);
    if (!ctx || n_prompt < 0 || llama_decode(ctx, llama_batch_get_one(tokens, n_prompt))) {
        return 1;
    }
    llama_token token = llama_sampler_sample(sampler, ctx, -1);
    const double start = now();
    for (int i = 1; i < n_tokens; i++) {
        printf("%d ", token);
        if (llama_decode(ctx, llama_batch_get_one(&token, 1))) {
            return 1;
        }
        token = llama_sampler_sample(sampler, ctx, -1);
    }
    const double seconds = now() - start;
    printf("%d\n%.6f\n", token, seconds);
    return 0;
}
