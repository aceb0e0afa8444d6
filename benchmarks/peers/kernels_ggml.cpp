// llama.cpp's ggml as a worker of `cargo study peers-kernels`: kernels_ggml LIBRARIES THREADS
//
// LIBRARIES is the directory of ggml's libraries, or the one to load.
//
// Reads requests from standard input and answers with lines of JSON, as benchmarks/kernels-worker does. Weights are
// placed where llama.cpp itself would place them: in the buffer type that repacks them if it supports the product,
// otherwise in plain memory. A pass is one graph with one product per copy of the weights. Each product quantizes the
// activations. ggml's threads wait for work as in llama.cpp, and sleep during the passes of others.

#include "ggml_worker.hpp"

namespace {

struct Case {
    Cpu & cpu;
    int64_t n, k, m = 0;
    std::unique_ptr<Context> weights, run;
    std::vector<ggml_tensor *> copies;
    std::vector<float> base;
    ggml_tensor * last = nullptr;
    ggml_cgraph * graph = nullptr;
    size_t bytes = 0, used = 0;
    std::string place;

    Case(Cpu & cpu, ggml_type type, int64_t n, int64_t k, size_t rotate) : cpu(cpu), n(n), k(k) {
        const size_t row = ggml_row_size(type, k);
        bytes = row * n;
        const size_t count = (rotate + bytes - 1) / bytes;
        weights = std::make_unique<Context>(count);
        for (size_t i = 0; i < count; ++i) copies.push_back(ggml_new_tensor_2d(weights->at, type, k, n));
        ggml_backend_buffer_type_t chosen = choose(cpu, [&](ggml_context * at) {
            ggml_tensor * w = ggml_new_tensor_2d(at, type, k, n);
            return ggml_mul_mat(at, w, ggml_new_tensor_2d(at, GGML_TYPE_F32, k, 512));
        });
        place = ggml_backend_buft_name(chosen);
        weights->buffer = ggml_backend_alloc_ctx_tensors_from_buft(weights->at, chosen);
        require(weights->buffer, "no memory");
        ggml_backend_buffer_set_usage(weights->buffer, GGML_BACKEND_BUFFER_USAGE_WEIGHTS);

        base = normal(BASE * k, 0.02f, k);
        std::vector<uint8_t> rows(row * n);
        ggml_quantize_chunk(type, base.data(), rows.data(), 0, BASE, k, nullptr);
        for (int64_t r = BASE; r < n; ++r) std::memcpy(&rows[r * row], &rows[r % BASE * row], row);
        for (ggml_tensor * copy : copies) ggml_backend_tensor_set(copy, rows.data(), 0, rows.size());
        if (copies[0]->extra) place += ", repacked";
    }

    void tokens(int64_t count, bool rotate) {
        m = count;
        used = rotate ? copies.size() : 1;
        run = std::make_unique<Context>(used + 2);
        ggml_tensor * x = ggml_new_tensor_2d(run->at, GGML_TYPE_F32, k, m);
        graph = ggml_new_graph_custom(run->at, used + 1, false);
        for (size_t i = 0; i < used; ++i) {
            last = ggml_mul_mat(run->at, copies[i], x);
            ggml_build_forward_expand(graph, last);
        }
        run->buffer = ggml_backend_alloc_ctx_tensors(run->at, cpu.backend);
        require(run->buffer, "no memory");
        const std::vector<float> values = normal(m * k, 1.0f, 1);
        ggml_backend_tensor_set(x, values.data(), 0, ggml_nbytes(x));
    }

    void pass() {
        require(ggml_backend_graph_compute(cpu.backend, graph) == GGML_STATUS_SUCCESS, "cannot compute the graph");
    }

    // Relative error of some outputs, compared with the product of the unquantized weights: the root mean square of the
    // difference divided by that of the product.
    double error() {
        const std::vector<float> values = normal(m * k, 1.0f, 1);
        std::vector<float> out(m * n);
        ggml_backend_tensor_get(last, out.data(), 0, ggml_nbytes(last));
        double wrong = 0, all = 0;
        for (int64_t token : { int64_t(0), m - 1 }) {
            for (int64_t r = 0; r < BASE; ++r) {
                double expected = 0;
                for (int64_t i = 0; i < k; ++i) expected += double(base[r * k + i]) * values[token * k + i];
                for (int64_t column : { r, n - BASE + r }) {
                    const double off = out[token * n + column] - expected;
                    wrong += off * off;
                    all += expected * expected;
                }
            }
        }
        return std::sqrt(wrong / all);
    }
};

} // namespace

int main(int argc, char ** argv) {
    std::map<std::string, std::unique_ptr<Case>> cases;
    using Words = std::istringstream;
    return serve(argc, argv, "\"Q4_0\",\"Q4_K\",\"Q5_K\",\"Q6_K\",\"IQ4_XS\",\"IQ4_NL\",\"Q8_0\",\"MXFP4\",\"NVFP4\"", [&](Cpu & cpu, const std::string & request, const std::string & name, Words & words) {
        if (request == "prepare") {
            int64_t n, k;
            size_t rotate;
            words >> n >> k >> rotate;
            cases[name] = std::make_unique<Case>(cpu, type_of(name), n, k, rotate);
            const Case & made = *cases[name];
            std::printf("{\"bytes\":%zu,\"copies\":%zu,\"note\":\"%s\"}\n", made.bytes, made.copies.size(),
                        made.place.c_str());
        } else if (request == "tokens") {
            int64_t m;
            int rotate;
            words >> m >> rotate;
            cases.at(name)->tokens(m, rotate);
            cases.at(name)->pass();
            std::printf("{\"error\":%.6f}\n", cases.at(name)->error());
        } else if (request == "run") {
            double milliseconds;
            words >> milliseconds;
            Case & own = *cases.at(name);
            print_seconds(passes(milliseconds, own.used, [&] { own.pass(); }));
        } else if (request == "drop") {
            cases.erase(name);
            std::printf("{}\n");
        } else {
            return false;
        }
        return true;
    });
}
