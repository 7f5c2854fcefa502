// Reads records "<length>\n<bytes>" from stdin and writes one line of token ids per record: see tokcheck.py.
//
// Build, with LLAMA the folder of a built llama.cpp:
//   g++ -std=c++17 -O2 tokcheck.cpp -o tokcheck -I$LLAMA/include -I$LLAMA/ggml/include
//       -L$LLAMA/build/bin -Wl,-rpath,$LLAMA/build/bin -lllama

#include "llama.h"

#include <cstdio>
#include <string>
#include <vector>

int main(int argc, char ** argv) {
    if (argc != 2) {
        fprintf(stderr, "usage: %s MODEL.gguf < records\n", argv[0]);
        return 1;
    }
    llama_backend_init();
    llama_model_params params = llama_model_default_params();
    params.vocab_only = true;
    llama_model * model = llama_model_load_from_file(argv[1], params);
    if (!model) {
        return 1;
    }
    const llama_vocab * vocab = llama_model_get_vocab(model);

    size_t length;
    while (scanf("%zu", &length) == 1) {
        getchar();  // the line end after the length
        std::string text(length, 0);
        if (fread(&text[0], 1, length, stdin) != length) {
            fprintf(stderr, "%s: record of %zu bytes cut short\n", argv[0], length);
            return 2;
        }
        std::vector<llama_token> tokens(length + 8);
        const int count =
            llama_tokenize(vocab, text.data(), (int) length, tokens.data(), (int) tokens.size(), false, false);
        for (int i = 0; i < count; i++) {
            printf("%d ", tokens[i]);
        }
        printf("\n");
    }
    llama_model_free(model);
    llama_backend_free();
    return 0;
}
