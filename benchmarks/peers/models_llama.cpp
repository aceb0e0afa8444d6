// Whole models in llama.cpp, for `cargo study peers-models`:
//
//     models_llama quantize IN.gguf OUT.gguf Q4_0|Q4_K_M|Q8_0 THREADS LIBRARIES
//     models_llama bench MODEL.gguf PREFILL DECODE REPEAT THREADS LIBRARIES
//
// quantize also stores the head and the embedding as Q4_0, Q4_K or Q8_0. bench processes PREFILL tokens at once with an
// empty cache, then generates DECODE more one at a time, greedily. It repeats this REPEAT times and prints a line of
// JSON with the seconds of both parts for every repetition. Threads wait for work as in llama.cpp's own programs.

#include "ggml-backend.h"
#include "ggml-cpu.h"
#include "llama.h"

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <string>
#include <vector>

namespace {

double now() {
    using namespace std::chrono;
    return duration<double>(steady_clock::now().time_since_epoch()).count();
}

int fail(const char * what) {
    std::fprintf(stderr, "error: %s\n", what);
    return 1;
}

int quantize(const char * in, const char * out, const std::string & type, int threads) {
    llama_model_quantize_params params = llama_model_quantize_default_params();
    params.nthread = threads;
    params.ftype = type == "Q4_0" ? LLAMA_FTYPE_MOSTLY_Q4_0
        : type == "Q4_K_M"        ? LLAMA_FTYPE_MOSTLY_Q4_K_M
                                  : LLAMA_FTYPE_MOSTLY_Q8_0;
    params.output_tensor_type = type == "Q4_0" ? GGML_TYPE_Q4_0 : type == "Q4_K_M" ? GGML_TYPE_Q4_K : GGML_TYPE_Q8_0;
    params.token_embedding_type = params.output_tensor_type;
    return llama_model_quantize(in, out, &params) == 0 ? 0 : fail("the model cannot be quantized");
}

void print(const char * name, const std::vector<double> & seconds, const char * after) {
    std::printf("\"%s\":[", name);
    for (size_t i = 0; i < seconds.size(); ++i) std::printf("%s%.6f", i ? "," : "", seconds[i]);
    std::printf("]%s", after);
}

int bench(const char * file, int prefill, int decode, int repeat, int threads) {
    llama_model * model = llama_model_load_from_file(file, llama_model_default_params());
    if (!model) return fail("the model cannot be loaded");
    llama_context_params params = llama_context_default_params();
    params.n_ctx = prefill + decode;
    params.n_batch = params.n_ubatch = prefill;
    params.n_threads = params.n_threads_batch = threads;
    params.no_perf = true;
    llama_context * context = llama_init_from_model(model, params);
    if (!context) return fail("cannot create a context");
    ggml_backend_reg_t cpu = ggml_backend_dev_backend_reg(ggml_backend_dev_by_type(GGML_BACKEND_DEVICE_TYPE_CPU));
    auto make = reinterpret_cast<decltype(&ggml_threadpool_new)>(
        ggml_backend_reg_get_proc_address(cpu, "ggml_threadpool_new"));
    if (!make) return fail("the CPU backend has no thread pool");
    ggml_threadpool_params pool = ggml_threadpool_params_default(threads);
    llama_attach_threadpool(context, make(&pool), nullptr);

    const int vocab = llama_vocab_n_tokens(llama_model_get_vocab(model));
    std::vector<llama_token> prompt;
    // The same tokens as in `quant bench`.
    for (int i = 0; i < prefill; ++i) prompt.push_back((i * 7919 + 1) % vocab);
    std::vector<double> prefills, decodes;
    for (int r = 0; r < repeat; ++r) {
        llama_memory_clear(llama_get_memory(context), true);
        llama_token token = 0;
        auto step = [&](llama_token * tokens, int count) {
            if (llama_decode(context, llama_batch_get_one(tokens, count)) != 0) return false;
            const float * logits = llama_get_logits_ith(context, -1);
            token = std::max_element(logits, logits + vocab) - logits;
            return true;
        };
        double started = now();
        if (!step(prompt.data(), prefill)) return fail("prefill failed");
        prefills.push_back(now() - started);
        started = now();
        for (int i = 0; i < decode; ++i) {
            llama_token last = token;
            if (!step(&last, 1)) return fail("decode failed");
        }
        decodes.push_back(now() - started);
    }
    std::printf("{\"version\":\"%s\",", llama_version());
    print("prefill", prefills, ",");
    print("decode", decodes, "}\n");
    return 0;
}

} // namespace

int main(int argc, char ** argv) {
    const std::string what = argc > 1 ? argv[1] : "";
    llama_log_set([](ggml_log_level, const char *, void *) {}, nullptr);
    if (what == "quantize" && argc == 7) {
        ggml_backend_load_all_from_path(argv[6]);
        return quantize(argv[2], argv[3], argv[4], std::stoi(argv[5]));
    }
    if (what == "bench" && argc == 8) {
        ggml_backend_load_all_from_path(argv[7]);
        return bench(argv[2], std::stoi(argv[3]), std::stoi(argv[4]), std::stoi(argv[5]), std::stoi(argv[6]));
    }
    return fail("usage: models_llama quantize IN OUT TYPE THREADS LIBRARIES, or bench MODEL PREFILL DECODE REPEAT THREADS LIBRARIES");
}
