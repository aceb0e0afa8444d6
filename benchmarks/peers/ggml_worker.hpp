// The common code of the workers of `cargo study peers-kernels` and `peers-experts` that run llama.cpp's ggml: the
// device and its threads, tensor memory, random numbers, and the answers to requests.
#pragma once

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

// Number of distinct weight rows. Further rows repeat them, which no kernel exploits.
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

// The path of the loaded CPU library: there is one for each set of processor features.
std::string variant() {
    std::ifstream maps("/proc/self/maps");
    for (std::string line; std::getline(maps, line);) {
        if (line.find("libggml-cpu-") != std::string::npos) return line.substr(line.find('/'));
    }
    throw std::runtime_error("the library of the CPU backend is not loaded");
}

// The device, its threads, and the functions of the library for this processor.
struct Cpu {
    ggml_backend_dev_t device;
    ggml_backend_t backend;
    ggml_threadpool * pool;
    decltype(&ggml_threadpool_pause) pause;
    std::vector<ggml_backend_buffer_type_t> places;

    explicit Cpu(int threads) {
        device = ggml_backend_dev_by_type(GGML_BACKEND_DEVICE_TYPE_CPU);
        require(device, "there is no CPU backend");
        backend = ggml_backend_dev_init(device, nullptr);
        auto set_threads = function<ggml_backend_set_n_threads_t>("ggml_backend_set_n_threads");
        set_threads(backend, threads);
        ggml_threadpool_params params = ggml_threadpool_params_default(threads);
        pool = function<decltype(&ggml_threadpool_new)>("ggml_threadpool_new")(&params);
        // The backend does not list this function, but its library exports it.
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

ggml_type type_of(const std::string & name) {
    if (name == "Q4_0") return GGML_TYPE_Q4_0;
    if (name == "Q4_K") return GGML_TYPE_Q4_K;
    if (name == "Q5_K") return GGML_TYPE_Q5_K;
    if (name == "Q6_K") return GGML_TYPE_Q6_K;
    if (name == "IQ4_XS") return GGML_TYPE_IQ4_XS;
    if (name == "IQ4_NL") return GGML_TYPE_IQ4_NL;
    if (name == "Q8_0") return GGML_TYPE_Q8_0;
    if (name == "MXFP4") return GGML_TYPE_MXFP4;
    if (name == "NVFP4") return GGML_TYPE_NVFP4;
    throw std::runtime_error("unknown type");
}

// Runs passes until the time is over, and returns the seconds per item of each. The first pass is a warm-up and is
// dropped, unless it is the only one.
template <typename Pass> std::vector<double> passes(double milliseconds, double things, Pass pass) {
    std::vector<double> taken;
    const double started = now();
    for (;;) {
        const double before = now();
        pass();
        const double after = now();
        taken.push_back((after - before) / things);
        if (after - started >= milliseconds / 1e3) break;
    }
    if (taken.size() > 1) taken.erase(taken.begin());
    return taken;
}

void print_seconds(const std::vector<double> & taken) {
    std::string list;
    for (double seconds : taken) {
        char text[32];
        std::snprintf(text, sizeof text, "%s%.9f", list.empty() ? "" : ",", seconds);
        list += text;
    }
    std::printf("{\"seconds\":[%s]}\n", list.c_str());
}

// The first buffer type that supports the product of these weights with activations, in llama.cpp's search order.
template <typename Product> ggml_backend_buffer_type_t choose(Cpu & cpu, Product product) {
    for (ggml_backend_buffer_type_t candidate : cpu.places) {
        Context probe(4);
        ggml_tensor * y = product(probe.at);
        ggml_tensor * w = y->src[0];
        w->buffer = ggml_backend_buft_alloc_buffer(candidate, 0);
        const bool can = ggml_backend_dev_supports_op(cpu.device, y);
        ggml_backend_buffer_free(w->buffer);
        if (can) return candidate;
    }
    throw std::runtime_error("no buffer type supports the product");
}

// Answers requests until there are no more. `answer` gets the device, the request, the name of a contestant and the
// rest of the line; it prints a line and returns whether it knows the request.
template <typename Answer> int serve(int argc, char ** argv, const char * contestants, Answer answer) {
    if (argc != 3) return 2;
    ggml_log_set([](ggml_log_level, const char *, void *) {}, nullptr);
    // A single library instead of the best of a directory.
    const std::string libraries = argv[1];
    if (libraries.size() > 3 && libraries.compare(libraries.size() - 3, 3, ".so") == 0) {
        if (!ggml_backend_load(argv[1])) return 3;
    } else {
        ggml_backend_load_all_from_path(argv[1]);
    }
    Cpu cpu(std::stoi(argv[2]));
    std::printf("{\"name\":\"ggml\",\"version\":\"%s, %s\",\"contestants\":[%s]}\n", ggml_version(),
                variant().substr(variant().rfind('/') + 1).c_str(), contestants);
    std::fflush(stdout);
    for (std::string line; std::getline(std::cin, line);) {
        std::istringstream words(line);
        std::string request, name;
        words >> request >> name;
        try {
            if (!answer(cpu, request, name, words)) std::printf("{\"failed\":\"unknown request\"}\n");
        } catch (const std::exception & failure) {
            std::printf("{\"failed\":\"%s\"}\n", failure.what());
        }
        cpu.pause(cpu.pool);
        std::fflush(stdout);
    }
    return 0;
}

} // namespace
