// llama.cpp's ggml as a worker of `cargo xtask peers-kernels`: kernels_ggml LIBRARIES THREADS
//
// Reads requests from standard input and answers with lines of JSON, as benchmarks/kernels-worker does. Weights are
// put where llama.cpp itself would put them: into the buffer type that repacks them where it can multiply them so,
// else into plain memory. A pass is one graph of one product a copy of the weights, each of which quantizes the
// activations, on threads of ggml that wait for work as in llama.cpp, and sleep between the passes of others.

#include "ggml-alloc.h"
#include "ggml-backend.h"
#include "ggml-cpu.h"
#include "ggml.h"

#include <chrono>
#include <cmath>
#include <cstdio>
#include <cstring>
#include <dlfcn.h>
#include <fstream>
#include <iostream>
#include <map>
#include <memory>
#include <random>
#include <sstream>
#include <stdexcept>
#include <string>
#include <vector>

namespace {

// Rows of weights that differ; further rows repeat them, which no kernel looks at.
constexpr int64_t BASE = 128;

double now() {
    using namespace std::chrono;
    return duration<double>(steady_clock::now().time_since_epoch()).count();
}

std::vector<float> normal(size_t count, float deviation, unsigned seed) {
    std::mt19937 engine(seed);
    std::normal_distribution<float> distribution(0.0f, deviation);
    std::vector<float> values(count);
    for (float & v : values) v = distribution(engine);
    return values;
}

void require(bool holds, const char * what) {
    if (!holds) throw std::runtime_error(what);
}

// The library of the code for this processor, one of several.
std::string variant() {
    std::ifstream maps("/proc/self/maps");
    for (std::string line; std::getline(maps, line);) {
        if (line.find("libggml-cpu-") != std::string::npos) return line.substr(line.find('/'));
    }
    throw std::runtime_error("no library of the CPU backend");
}

// The device, its threads, and the functions of the library that was chosen for this processor.
struct Cpu {
    ggml_backend_dev_t device;
    ggml_backend_t backend;
    ggml_threadpool * pool;
    decltype(&ggml_threadpool_pause) pause;
    std::vector<ggml_backend_buffer_type_t> places;

    explicit Cpu(int threads) {
        device = ggml_backend_dev_by_type(GGML_BACKEND_DEVICE_TYPE_CPU);
        require(device, "no CPU backend");
        backend = ggml_backend_dev_init(device, nullptr);
        auto set_threads = function<ggml_backend_set_n_threads_t>("ggml_backend_set_n_threads");
        set_threads(backend, threads);
        ggml_threadpool_params params = ggml_threadpool_params_default(threads);
        pool = function<decltype(&ggml_threadpool_new)>("ggml_threadpool_new")(&params);
        // This one is not handed out by name, but it is in the library that was loaded.
        void * library = dlopen(variant().c_str(), RTLD_NOW | RTLD_NOLOAD);
        require(library, "the library of the CPU backend is not loaded");
        pause = reinterpret_cast<decltype(pause)>(dlsym(library, "ggml_threadpool_pause"));
        require(pause, "ggml_threadpool_pause");
        function<decltype(&ggml_backend_cpu_set_threadpool)>("ggml_backend_cpu_set_threadpool")(backend, pool);
        auto extra = function<ggml_backend_dev_get_extra_bufts_t>("ggml_backend_dev_get_extra_bufts")(device);
        for (; extra && *extra; ++extra) places.push_back(*extra);
        places.push_back(ggml_backend_dev_buffer_type(device));
    }

    template <typename F> F function(const char * name) {
        auto found = ggml_backend_reg_get_proc_address(ggml_backend_dev_backend_reg(device), name);
        require(found, name);
        return reinterpret_cast<F>(found);
    }
};

struct Context {
    ggml_context * at;
    ggml_backend_buffer_t buffer = nullptr;

    explicit Context(size_t tensors) {
        at = ggml_init({ tensors * ggml_tensor_overhead() + ggml_graph_overhead_custom(tensors, false), nullptr, true });
    }
    ~Context() {
        ggml_backend_buffer_free(buffer);
        ggml_free(at);
    }
    Context(const Context &) = delete;
};

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
        ggml_backend_buffer_type_t chosen = choose(type);
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

    // The first place in which the product can be computed, as llama.cpp looks for one.
    ggml_backend_buffer_type_t choose(ggml_type type) {
        for (ggml_backend_buffer_type_t candidate : cpu.places) {
            Context probe(3);
            ggml_tensor * w = ggml_new_tensor_2d(probe.at, type, k, n);
            ggml_tensor * x = ggml_new_tensor_2d(probe.at, GGML_TYPE_F32, k, 512);
            ggml_tensor * y = ggml_mul_mat(probe.at, w, x);
            w->buffer = ggml_backend_buft_alloc_buffer(candidate, 0);
            const bool can = ggml_backend_dev_supports_op(cpu.device, y);
            ggml_backend_buffer_free(w->buffer);
            if (can) return candidate;
        }
        throw std::runtime_error("no place for the weights");
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
        require(ggml_backend_graph_compute(cpu.backend, graph) == GGML_STATUS_SUCCESS, "the graph fails");
    }

    // Of some outputs, against the product of the weights before they were quantized: RMS over RMS.
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

    // Seconds of a product, of as many passes as fit the time; the first one only warms up, unless it was long.
    std::vector<double> passes(double milliseconds) {
        std::vector<double> taken;
        const double started = now();
        for (;;) {
            const double before = now();
            pass();
            const double after = now();
            taken.push_back((after - before) / used);
            if (after - started >= milliseconds / 1e3) break;
        }
        if (taken.size() > 1) taken.erase(taken.begin());
        return taken;
    }
};

ggml_type type_of(const std::string & name) {
    if (name == "Q4_0") return GGML_TYPE_Q4_0;
    if (name == "Q4_K") return GGML_TYPE_Q4_K;
    if (name == "Q8_0") return GGML_TYPE_Q8_0;
    throw std::runtime_error("unknown type");
}

} // namespace

int main(int argc, char ** argv) {
    if (argc != 3) return 2;
    ggml_log_set([](ggml_log_level, const char *, void *) {}, nullptr);
    ggml_backend_load_all_from_path(argv[1]);
    Cpu cpu(std::stoi(argv[2]));
    std::printf("{\"name\":\"ggml\",\"version\":\"%s, %s\",\"contestants\":[\"Q4_0\",\"Q4_K\",\"Q8_0\"]}\n",
                ggml_version(), variant().substr(variant().rfind('/') + 1).c_str());
    std::fflush(stdout);
    std::map<std::string, std::unique_ptr<Case>> cases;
    for (std::string line; std::getline(std::cin, line);) {
        std::istringstream words(line);
        std::string request, name;
        words >> request >> name;
        try {
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
                std::string list;
                for (double seconds : cases.at(name)->passes(milliseconds)) {
                    char text[32];
                    std::snprintf(text, sizeof text, "%s%.9f", list.empty() ? "" : ",", seconds);
                    list += text;
                }
                std::printf("{\"seconds\":[%s]}\n", list.c_str());
            } else if (request == "drop") {
                cases.erase(name);
                std::printf("{}\n");
            } else {
                std::printf("{\"failed\":\"unknown request\"}\n");
            }
        } catch (const std::exception & failure) {
            std::printf("{\"failed\":\"%s\"}\n", failure.what());
        }
        cpu.pause(cpu.pool);
        std::fflush(stdout);
    }
}
