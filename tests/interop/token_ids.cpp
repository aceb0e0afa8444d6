// Prints the token IDs that llama.cpp gives texts: token-ids MODEL.gguf TEXTS
//
// TEXTS are separated by NUL bytes. Each gives a line of IDs. Special tokens are recognized within texts, and those that
// the file asks for are added at the ends.
#include <algorithm>
#include <cstdio>
#include <fstream>
#include <iterator>
#include <string>
#include <vector>

#include "llama.h"

int main(int count, char ** arguments) {
    if (count != 3) {
        std::fprintf(stderr, "usage: token-ids MODEL.gguf TEXTS\n");
        return 2;
    }
    llama_log_set([](ggml_log_level level, const char * text, void *) {
        if (level >= GGML_LOG_LEVEL_ERROR) {
            std::fputs(text, stderr);
        }
    }, nullptr);
    llama_backend_init();
    llama_model_params parameters = llama_model_default_params();
    parameters.vocab_only = true;
    llama_model * model = llama_model_load_from_file(arguments[1], parameters);
    if (model == nullptr) {
        std::fprintf(stderr, "cannot load %s\n", arguments[1]);
        return 1;
    }
    const llama_vocab * vocab = llama_model_get_vocab(model);
    std::ifstream file(arguments[2], std::ios::binary);
    const std::string all((std::istreambuf_iterator<char>(file)), std::istreambuf_iterator<char>());
    for (size_t at = 0; at < all.size();) {
        const size_t end = std::min(all.find('\0', at), all.size());
        const std::string text = all.substr(at, end - at);
        std::vector<llama_token> tokens(text.size() + 8);
        const int written = llama_tokenize(vocab, text.data(), text.size(), tokens.data(), tokens.size(), true, true);
        if (written < 0) {
            std::fprintf(stderr, "%d tokens for %zu bytes\n", -written, text.size());
            return 1;
        }
        for (int i = 0; i < written; ++i) {
            std::printf("%s%d", i ? " " : "", tokens[i]);
        }
        std::printf("\n");
        at = end + 1;
    }
    llama_model_free(model);
}
