// What Python calls (ctypes), and the choice of an instruction set. Compiled for any machine of the architecture.
//
// PACELINE_ISAS lists the instruction sets that the library was compiled for, the slowest first: ISA(name) ISA(name)...
#include "span.h"

#include <omp.h>
#if defined(__x86_64__)
#include <cpuid.h>
#endif
#if defined(PACELINE_TILES)
#include <sys/syscall.h>
#endif
#if __has_include(<unistd.h>)
#include <unistd.h>
#endif

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdlib>
#include <cstring>
#include <new>

namespace paceline {

#define ISA(name) namespace name { extern const Kernels kernels; }
PACELINE_ISAS
#undef ISA

namespace {

struct Isa {
    const char* name;
    const Kernels* kernels;
};

#define ISA(name) {#name, &name::kernels},
constexpr Isa ISAS[] = {PACELINE_ISAS};
#undef ISA

bool runs_here([[maybe_unused]] const char* name) {
#if defined(__x86_64__)
    __builtin_cpu_init();
    unsigned a, b, features = 0, d;
    __get_cpuid(1, &a, &b, &features, &d);
    const bool f16c = features & bit_F16C;  // a hypervisor may hide it
    const bool avx2 = f16c && __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
    if (!std::strcmp(name, "avx2")) return avx2;
    if (!std::strcmp(name, "avx512"))
        return avx2 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512dq") &&
               __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512vl");
    if (!std::strcmp(name, "zen"))
        return runs_here("avx512") && __builtin_cpu_supports("avx512vnni") && __builtin_cpu_is("amd");
#endif
    return true;
}

// Not on Intel's, where one of them takes as long as four multiply-adds of floats, and does the work of two.
bool bfloat16_dots_run_here() {
#if defined(__x86_64__)
    return runs_here("avx512") && __builtin_cpu_supports("avx512bf16") && !__builtin_cpu_is("intel");
#else
    return false;
#endif
}

bool byte_dots_run_here() {
#if defined(__x86_64__)
    return runs_here("avx512") && __builtin_cpu_supports("avx512vnni");
#else
    return false;
#endif
}

// Where it holds 48 KB, weights of the next job come into it at once; where it holds 32, they would drive out what is
// read now, and come into the second cache.
bool large_l1_here() {
#if defined(_SC_LEVEL1_DCACHE_SIZE)
    const long bytes = sysconf(_SC_LEVEL1_DCACHE_SIZE);
    return bytes <= 0 || bytes > 32 << 10;  // not known: as on most
#else
    return true;
#endif
}

// AVX-512's code with AMX's products of bfloat16 (amx.cpp).
constexpr char TILES[] = "amx";

// Linux lets a process use tiles that asks for it.
bool tiles_run_here() {
#if defined(PACELINE_TILES)
    constexpr unsigned BFLOAT16 = 1 << 22, TILE = 1 << 24;  // of what cpuid says in edx
    constexpr int REQUEST_PERMISSION = 0x1023, TILE_DATA = 18;
    unsigned a, b, c, features = 0;
    __get_cpuid_count(7, 0, &a, &b, &c, &features);
    return runs_here("avx512") && __builtin_cpu_supports("avx512bf16") && features & BFLOAT16 && features & TILE &&
           !syscall(SYS_arch_prctl, REQUEST_PERMISSION, TILE_DATA);
#else
    return false;
#endif
}

const Isa* find(const char* name) {
    if (!std::strcmp(name, TILES)) return tiles_run_here() ? find("avx512") : nullptr;
    for (const Isa& isa : ISAS)
        if (!std::strcmp(isa.name, name) && runs_here(name)) return &isa;
    return nullptr;
}

const Isa* fastest() {
    const Isa* best = ISAS;
    for (const Isa& isa : ISAS)
        if (runs_here(isa.name)) best = &isa;
    return best;
}

std::atomic<const Isa*> chosen = fastest();

bool are_outputs(const Matrix& w, const int64_t* outputs, int64_t count) {
    return std::all_of(outputs, outputs + count, [&](int64_t at) { return 0 <= at && at < w.outputs; });
}

struct Scratch {  // memory that grows and is used again and again
    float* floats = nullptr;
    size_t size = 0;

    ~Scratch() { std::free(floats); }

    float* of(size_t wanted) {
        if (wanted > size) {
            std::free(floats);
            size = (wanted + 15) / 16 * 16;
            floats = static_cast<float*>(std::aligned_alloc(64, sizeof(float) * size));
            if (!floats) size = 0, throw std::bad_alloc();
        }
        return floats;
    }
};

thread_local Scratch scratch;

enum Outcome : int { NO_TOKEN, DONE, NO_MEMORY };  // of a call: but for `DONE`, it has done nothing

// Python's callers know no exceptions of C++.
template <class Run>
int outcome(Run run) {
    try {
        return run();
    } catch (const std::bad_alloc&) {
        return NO_MEMORY;
    }
}

template <class Run>
double seconds(int threads, Run run) {  // for all of them together
    const auto start = std::chrono::steady_clock::now();
#pragma omp parallel num_threads(threads)
    run(omp_get_thread_num());
    return std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
}

}  // namespace

const Kernels& kernels() { return *chosen.load(std::memory_order_relaxed)->kernels; }

const bool has_bfloat16_dots = bfloat16_dots_run_here(), has_byte_dots = byte_dots_run_here(),
           has_large_l1 = large_l1_here();
std::atomic<bool> use_tiles = find(TILES) != nullptr;

}  // namespace paceline

using namespace paceline;

#pragma GCC visibility push(default)
extern "C" {

// Whether the library has this instruction set, and the machine too.
bool paceline_has_isa(const char* name) { return find(name) != nullptr; }

// From now on all passes run on it. False: there is none of this name.
bool paceline_choose_isa(const char* name) {
    const Isa* found = find(name);
    if (found) chosen = found, use_tiles = !std::strcmp(name, TILES);
    return found != nullptr;
}

const char* paceline_chosen_isa() { return use_tiles ? TILES : chosen.load()->name; }

size_t paceline_packed_bytes(const Matrix* w) { return kernels().packed_bytes(*w); }

// rows[i], of `row_bytes` bytes each, becomes the weights of output outputs[i]. Returns whether all of them are `near`.
bool paceline_pack(const Matrix* w, const uint8_t* rows, int64_t row_bytes, const int64_t* outputs, int count,
                   uint8_t* packed) {
    bool near = true;
#pragma omp parallel for reduction(&& : near)
    for (int i = 0; i < count; i++) near = kernels().pack_row(*w, outputs[i], rows + i * row_bytes, packed) && near;
    return near;
}

// to[i] = the weights of output outputs[i], as floats. Returns false for an output that is not there.
bool paceline_rows(const Matrix* w, const int64_t* outputs, int count, float* to) {
    if (!are_outputs(*w, outputs, count)) return false;
#pragma omp parallel for if (count > 16)
    for (int i = 0; i < count; i++) kernels().unpack_row(*w, outputs[i], to + (size_t)i * w->inputs);
    return true;
}

// to[i] = the length of panel i's longest row, or a little more: see `Rough`.
void paceline_lengths(const Matrix* w, float* to) {
#pragma omp parallel for
    for (int i = 0; i < (w->outputs + PANEL - 1) / PANEL; i++) to[i] = kernels().panel_length(*w, i);
}

// A pass, which may be over no tokens.
int paceline_pass(const Model* model, const Call* call) {
    return outcome([&] {
        const Entry& entry = call->entry;
        const int64_t tokens = (int64_t)call->span.batch * call->span.width;
        if (entry.embedding && !are_outputs(*entry.embedding, entry.ids, tokens)) return NO_TOKEN;
        thread_local Places places;
        Pass pass{*call};
        places.fill(pass);
        if (!pass.tokens) return DONE;
        pass.workspace = scratch.of(kernels().workspace_floats(*model, pass));
        kernels().run(*model, pass);
        return DONE;
    });
}

// hidden [tokens, hidden] -> logits [tokens, vocabulary].
int paceline_head(const Model* model, const float* hidden, int tokens, int threads, float* logits) {
    return outcome([&] {
        if (!tokens) return DONE;
        float* workspace = scratch.of((size_t)tokens * row_stride(model->hidden));
        kernels().head(*model, hidden, tokens, threads, workspace, logits);
        return DONE;
    });
}

// Of a row of logits: the first of the largest, its log-probability and the entropy in nats.
void paceline_judge(float* logits, int size, int64_t* likeliest, float* logp, float* entropy) {
    kernels().judge(logits, size, 1, likeliest, logp, entropy);
}

// The entry at a quantile of softmax(scale * scores); -1: there is no memory.
int paceline_draw(const float* scores, int size, float scale, double quantile) {
    int token = -1;
    outcome([&] { return token = kernels().draw(scores, size, scale, quantile); });
    return token;
}

// Operations a second of independent products and sums, over some milliseconds: of floats, bfloat16 (BF16) or bytes
// (Q8_0), by the fastest instruction there is.
double paceline_peak(int threads, int32_t input_kind) {
    std::atomic<int64_t> operations = 0;
    const double took = seconds(threads, [&](int) {
        operations += (int64_t)kernels().multiply_add(1'000'000, input_kind);
    });
    return operations / took;
}

// Bytes a second of reading `count` floats once, cut into a piece for each thread.
double paceline_bandwidth(const float* buffer, int64_t count, int threads) {
    const int64_t piece = count / threads;
    const double took = seconds(threads, [&](int thread) {
        volatile float result = kernels().read(buffer + piece * thread, piece);
        (void)result;
    });
    return sizeof(float) * piece * threads / took;
}
}
#pragma GCC visibility pop
