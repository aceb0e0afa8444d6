// llama.cpp's ggml as a worker of `cargo study peers-experts`: experts_ggml LIBRARIES THREADS
//
// Computes the experts of a layer as llama.cpp's models do: gate and up by `ggml_mul_mat_id`, their product, down by
// `ggml_mul_mat_id`, multiplication by the tokens' weights, and the sum over a token's experts. Requests are those of
// benchmarks/kernels-worker; a line `route NAME TOKENS CALLS TOP_K` is followed by a line with the experts of all
// tokens of all calls. A pass is one graph with all calls.

#include "ggml_worker.hpp"

namespace {

struct Experts {
    Cpu & cpu;
    int64_t inner, hidden, count, m = 0, calls = 0, top_k = 0;
    std::unique_ptr<Context> weights, run;
    ggml_tensor * gate, * up, * down, * last = nullptr;
    std::vector<float> rows_in, rows_out;
    ggml_cgraph * graph = nullptr;
    size_t bytes = 0;
    std::string place;

    Experts(Cpu & cpu, ggml_type type, int64_t inner, int64_t hidden, int64_t count)
        : cpu(cpu), inner(inner), hidden(hidden), count(count) {
        weights = std::make_unique<Context>(3);
        gate = ggml_new_tensor_3d(weights->at, type, hidden, inner, count);
        up = ggml_new_tensor_3d(weights->at, type, hidden, inner, count);
        down = ggml_new_tensor_3d(weights->at, type, inner, hidden, count);
        ggml_backend_buffer_type_t chosen = choose(cpu, [&](ggml_context * at) {
            ggml_tensor * w = ggml_new_tensor_3d(at, type, hidden, inner, count);
            ggml_tensor * x = ggml_new_tensor_3d(at, GGML_TYPE_F32, hidden, 1, 512);
            return ggml_mul_mat_id(at, w, x, ggml_new_tensor_2d(at, GGML_TYPE_I32, 8, 512));
        });
        place = ggml_backend_buft_name(chosen);
        weights->buffer = ggml_backend_alloc_ctx_tensors_from_buft(weights->at, chosen);
        require(weights->buffer, "no memory");
        ggml_backend_buffer_set_usage(weights->buffer, GGML_BACKEND_BUFFER_USAGE_WEIGHTS);
        rows_in = normal(BASE * hidden, 0.02f, hidden);
        rows_out = normal(BASE * inner, 0.02f, inner);
        set(gate, rows_in, hidden, inner);
        set(up, rows_in, hidden, inner);
        set(down, rows_out, inner, hidden);
        bytes = (ggml_nbytes(gate) + ggml_nbytes(up) + ggml_nbytes(down)) / count;
        if (gate->extra) place += ", repacked";
    }

    // All experts have the same weights, but each has its own memory.
    void set(ggml_tensor * tensor, const std::vector<float> & base, int64_t k, int64_t n) {
        const size_t row = ggml_row_size(tensor->type, k);
        std::vector<uint8_t> rows(row * n * count);
        ggml_quantize_chunk(tensor->type, base.data(), rows.data(), 0, BASE, k, nullptr);
        for (int64_t r = BASE; r < n * count; ++r) std::memcpy(&rows[r * row], &rows[r % BASE * row], row);
        ggml_backend_tensor_set(tensor, rows.data(), 0, rows.size());
    }

    void route(int64_t tokens, int64_t how_many, int64_t slots, const std::vector<int32_t> & experts) {
        m = tokens;
        calls = how_many;
        top_k = slots;
        require(experts.size() == size_t(m * calls * top_k), "the number of experts does not match the request");
        const size_t tensors = 2 + calls * (8 + 3 * top_k);
        run = std::make_unique<Context>(tensors);
        ggml_context * at = run->at;
        ggml_tensor * x = ggml_new_tensor_3d(at, GGML_TYPE_F32, hidden, 1, m);
        ggml_tensor * of_tokens = ggml_new_tensor_3d(at, GGML_TYPE_F32, 1, top_k, m);
        graph = ggml_new_graph_custom(at, tensors, false);
        std::vector<ggml_tensor *> numbers;
        for (int64_t i = 0; i < calls; ++i) {
            ggml_tensor * ids = ggml_new_tensor_2d(at, GGML_TYPE_I32, top_k, m);
            numbers.push_back(ids);
            ggml_tensor * g = ggml_mul_mat_id(at, gate, x, ids);
            ggml_tensor * u = ggml_mul_mat_id(at, up, x, ids);
            ggml_tensor * y = ggml_mul_mat_id(at, down, ggml_swiglu_split(at, g, u), ids);
            y = ggml_mul(at, y, of_tokens);
            last = nullptr;
            for (int64_t slot = 0; slot < top_k; ++slot) {
                ggml_tensor * one = ggml_view_2d(at, y, hidden, m, y->nb[2], slot * y->nb[1]);
                last = last ? ggml_add(at, last, one) : one;
            }
            ggml_build_forward_expand(graph, last);
        }
        run->buffer = ggml_backend_alloc_ctx_tensors(at, cpu.backend);
        require(run->buffer, "no memory");
        const std::vector<float> values = normal(m * hidden, 1.0f, 1);
        ggml_backend_tensor_set(x, values.data(), 0, ggml_nbytes(x));
        const std::vector<float> shares(m * top_k, 1.0f / top_k);
        ggml_backend_tensor_set(of_tokens, shares.data(), 0, ggml_nbytes(of_tokens));
        for (int64_t i = 0; i < calls; ++i) {
            ggml_backend_tensor_set(numbers[i], &experts[i * m * top_k], 0, ggml_nbytes(numbers[i]));
        }
    }

    void pass() {
        require(ggml_backend_graph_compute(cpu.backend, graph) == GGML_STATUS_SUCCESS, "cannot compute the graph");
    }

    // Relative error of the first outputs of the first token, compared with the unquantized weights. All experts are
    // the same, and a token's weights add up to 1.
    double error() {
        const std::vector<float> values = normal(m * hidden, 1.0f, 1);
        std::vector<float> out(m * hidden);
        ggml_backend_tensor_get(last, out.data(), 0, out.size() * sizeof(float));
        std::vector<double> between(BASE);
        for (int64_t r = 0; r < BASE; ++r) {
            double g = 0;
            for (int64_t i = 0; i < hidden; ++i) g += double(rows_in[r * hidden + i]) * values[i];
            between[r] = g / (1 + std::exp(-g)) * g;
        }
        double wrong = 0, all = 0;
        for (int64_t r = 0; r < BASE; ++r) {
            double expected = 0;
            for (int64_t i = 0; i < inner; ++i) expected += rows_out[r * inner + i] * between[i % BASE];
            wrong += std::pow(out[r] - expected, 2);
            all += expected * expected;
        }
        return std::sqrt(wrong / all);
    }
};

} // namespace

int main(int argc, char ** argv) {
    std::map<std::string, std::unique_ptr<Experts>> cases;
    using Words = std::istringstream;
    return serve(argc, argv, "\"Q4_0\",\"Q4_K\"", [&](Cpu & cpu, const std::string & request, const std::string & name, Words & words) {
        if (request == "prepare") {
            int64_t inner, hidden, count;
            words >> inner >> hidden >> count;
            cases[name] = std::make_unique<Experts>(cpu, type_of(name), inner, hidden, count);
            const Experts & made = *cases[name];
            std::printf("{\"bytes\":%zu,\"copies\":1,\"note\":\"%s\"}\n", made.bytes, made.place.c_str());
        } else if (request == "route") {
            int64_t m, calls, top_k;
            words >> m >> calls >> top_k;
            std::vector<int32_t> experts;
            std::string line;
            std::getline(std::cin, line);
            std::istringstream numbers(line);
            for (int32_t expert; numbers >> expert;) experts.push_back(expert);
            Experts & own = *cases.at(name);
            own.route(m, calls, top_k, experts);
            own.pass();
            std::printf("{\"error\":%.6f}\n", own.error());
        } else if (request == "run") {
            double milliseconds;
            words >> milliseconds;
            Experts & own = *cases.at(name);
            print_seconds(passes(milliseconds, own.calls, [&] { own.pass(); }));
        } else if (request == "drop") {
            cases.erase(name);
            std::printf("{}\n");
        } else {
            return false;
        }
        return true;
    });
}
