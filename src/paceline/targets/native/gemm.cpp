// Matrix products y[token][output] = sum_k x[token][k] * w[output][k], for 1 to a few hundred tokens.
//
// Blocking. A matrix is packed into panels of 16 outputs: for each k the 16 weights lie side by side, so that lanes are
// outputs and every output is ONE chain of fused multiply-adds over k = 0, 1, 2, ...: the same bits at any width, on
// any instruction set, in any storage that represents the same weights. The micro-kernel keeps a tile of tokens x
// panels in registers (tiles.h says which). A job is one tile's panels for up to 96 tokens, so that weights stream
// from memory once, while those of the thread's next job are prefetched:
//   narrow: unpacked in registers, each weight used for all tokens of a tile;
//   wide:   some inputs at a time, unpacked to floats in the L1 cache first, over all tiles; accumulators are carried
//           from one such piece to the next, which leaves the chain as it is.
// Outputs may come from several matrices, stored as different kinds; their jobs are those of one step.
#include <algorithm>
#include <array>

#include "activations.h"
#include "amx.h"
#include "bfloat16.h"
#include "int8.h"
#include "kernel.h"
#include "kernels.h"

namespace paceline::PACELINE_ISA {
namespace {

template <int P>
constexpr Column on_floats = []<size_t... I>(std::index_sequence<I...>) {
    return Column{nullptr, kernel<StoreF32, I + 1, P>...};
}(std::make_index_sequence<TILING.tokens>());

float largest_output(const float* outputs, int count) {
    if (count < PANEL) return *std::max_element(outputs, outputs + count);
    return fold(load<Lanes<PANEL>::f>(outputs), [](auto a, auto b) { return a > b ? a : b; })[0];
}

// The sums of panel `panel`, one row for each token, to where they belong: `acc` has rows `stride` floats apart.
void finish(const Matrix& w, int panel, const float* acc, int stride, int tokens, float* y, int ldy,
            Epilogue epilogue) {
    const int first = panel * PANEL, count = std::min(PANEL, w.outputs - first);
    alignas(64) float sums[SLAB * PANEL];
    if (w.bias) {
        for (int t = 0; t < tokens; t++)
            for (int i = 0; i < PANEL; i++)
                sums[t * PANEL + i] = i < count ? acc[(size_t)t * stride + i] + w.bias[first + i] : 0.0f;
        acc = sums, stride = PANEL;
    }
    if (epilogue == SWIGLU) return gate_rows(acc, stride, tokens, y + first / 2, ldy);
    if (epilogue == PEAKS) {
        for (int t = 0; t < tokens; t++, acc += stride) y[(size_t)t * ldy + panel] = largest_output(acc, count);
        return;
    }
    y += first;
    for (int t = 0; t < tokens; t++, acc += stride, y += ldy)
        if (count < PANEL)
            for (int i = 0; i < count; i++) y[i] = epilogue == ADD ? y[i] + acc[i] : acc[i];
        else
            for (int i = 0; i < PANEL; i += WIDE)
                store(y + i, epilogue == ADD ? load<wf>(y + i) + load<wf>(acc + i) : load<wf>(acc + i));
}

size_t panel_bytes(const Matrix& w) {
    const Format& f = format(w.kind);
    return (size_t)(round_up(w.inputs, BLOCK) / f.block) * f.bytes;
}

struct Job {  // `panels` panels from `weights` on, for tokens first .. first + tokens - 1
    const uint8_t *weights, *next;  // next: what to prefetch
    int panels, first, tokens;
};

class Product {
  public:
    Product() = default;
    Product(const Matrix& w, const float* x, int ldx, int tokens)
        : format_(&format(w.kind, w.near)), x_(x), panel_bytes_(panel_bytes(w)), ldx_(ldx),
          inputs_(round_up(w.inputs, BLOCK)), fused_(tokens <= TILING.fused), pairs_(in_pairs(w)), bytes_(in_bytes(w)),
          tiles_(in_tiles(w)), kind_(w.kind) {
        together = bytes_   ? byte_panels(Cut(tokens, SLAB).largest())
                   : tiles_ ? TILE_BLOCK_PANELS
                   : pairs_ ? dot_panels(Cut(tokens, SLAB).largest())
                   : fused_ ? TILING.panels[Cut(tokens, TILING.largest()).largest()]
                            : TILING.together;
    }

    int together;  // panels of a job

    // acc[token][panels * 16] = sums.
    void compute(const Job& job, float* acc) const {
        if (bytes_)
            return byte_products(kind_, job.weights, job.panels, x_ + (size_t)job.first * ldx_, ldx_, job.tokens,
                                 inputs_, acc, job.next);
        if (tiles_)
            return tile_block_products(kind_, job.weights, job.panels, x_ + (size_t)job.first * ldx_, ldx_, job.tokens,
                                       inputs_, acc, job.next);
        if (pairs_)
            return dot_products(job.weights, job.panels, x_ + (size_t)job.first * ldx_, ldx_, job.tokens, inputs_ / 2,
                                acc, job.next);
        std::fill_n(acc, (size_t)job.tokens * job.panels * PANEL, 0.0f);
        if (job.panels < together)
            by_panel(job, acc);
        else if (fused_)
            narrow(job, acc);
        else
            wide(job, acc);
    }

  private:
    void narrow(const Job& job, float* acc) const {
        const Cut cut(job.tokens, TILING.largest());
        for (int tile = 0; tile < cut.count; tile++) {
            const int t = cut(tile), m = cut(tile + 1) - t, first = job.first + t;
            float* to = acc + t * job.panels * PANEL;
            if (TILING.panels[m] == job.panels)
                format_->kernels[m](job.weights, panel_bytes_, x_ + (size_t)first * ldx_, ldx_, inputs_, to,
                                    {job.next, tile ? 0 : job.panels * format_->bytes_of(TURN)});
            else
                by_panel({job.weights, job.next, job.panels, first, m}, to);
        }
    }

    // What no tile in registers is for: the last panels of a matrix, or a tile with one token less than the others.
    void by_panel(const Job& job, float* acc) const {
        alignas(64) float sums[SLAB * PANEL];
        for (int i = 0; i < job.panels; i++) {
            std::fill_n(sums, job.tokens * PANEL, 0.0f);
            wide({job.weights + i * panel_bytes_, job.next + i * panel_bytes_, 1, job.first, job.tokens}, sums);
            for (int t = 0; t < job.tokens; t++)
                std::copy_n(sums + t * PANEL, PANEL, acc + (t * job.panels + i) * PANEL);
        }
    }

    void wide(const Job& job, float* acc) const {
        const bool plain = format_ == &formats::f32;
        alignas(64) float floats[TILING.together * TILING.piece * PANEL];
        const Cut cut(job.tokens, TILING.tokens), pieces(inputs_ / BLOCK, TILING.piece / BLOCK);
        const Column& kernels = job.panels > 1 ? on_floats<TILING.together> : on_floats<1>;
        const uint8_t* next = job.next;
        for (int i = 0; i < pieces.count; i++) {
            const int k = pieces(i) * BLOCK, piece = pieces(i + 1) * BLOCK - k, turns = piece / TURN;
            for (int p = 0; p < job.panels && !plain; p++)
                format_->expand(job.weights + p * panel_bytes_, k, piece, floats + p * TILING.piece * PANEL);
            const uint8_t* w = plain ? job.weights + format_->bytes_of(k) : (const uint8_t*)floats;
            const size_t apart = plain ? panel_bytes_ : TILING.piece * PANEL * sizeof(float);
            const int step = round_up(job.panels * format_->bytes_of(piece) / (turns * cut.count), 64);
            for (int tile = 0; tile < cut.count; tile++, next += step * turns) {
                const int t = cut(tile), m = cut(tile + 1) - t;
                kernels[m](w, apart, x_ + (size_t)(job.first + t) * ldx_ + k, ldx_, piece,
                           acc + t * job.panels * PANEL, {next, step});
            }
        }
    }

    const Format* format_;
    const float* x_;
    size_t panel_bytes_;
    int ldx_, inputs_;
    bool fused_, pairs_, bytes_;  // pairs: of bfloat16, which are not unpacked at all; bytes: inputs are
    bool tiles_;                  // inputs are of bfloat16, weights are in blocks
    int32_t kind_;
};

// A product's jobs, over all the matrices that its outputs come from.
class Jobs {
  public:
    Jobs(const Matrix& w, const float* x, int ldx, int tokens, float* y, int ldy, Epilogue epilogue)
        : slabs_(tokens, SLAB), ldy_(ldy), epilogue_(epilogue) {
        for (const Matrix* part = &w; part; y += part->outputs, part = part->next) {
            const Product product(*part, x, ldx, tokens);
            const int groups = (panels_of(*part) + product.together - 1) / product.together;
            parts_[parts_count_++] = {part, product, y, count, groups};
            count += groups * slabs_.count;
        }
    }

    int count = 0;

    // `next` are the weights to prefetch.
    void run(int job, const uint8_t* next) const {
        const Part& part = part_of(job);
        const int slab = (job - part.first) / part.groups, panel = part.group(job) * part.product.together;
        const int panels = std::min(part.product.together, panels_of(*part.w) - panel);
        const int from = slabs_(slab), n = slabs_(slab + 1) - from;
        constexpr int together = std::max(TILING.together, TILE_BLOCK_PANELS);
        alignas(64) float acc[std::max(SLAB * together, TILING.fused * TILING.panels[1]) * PANEL];
        part.product.compute({part.weights(job), next, panels, from, n}, acc);
        float* y = part.y + (size_t)from * ldy_;
        for (int i = 0; i < panels; i++)
            finish(*part.w, panel + i, acc + i * PANEL, panels * PANEL, n, y, ldy_, epilogue_);
    }

    const uint8_t* weights(int job) const { return part_of(job).weights(job); }

  private:
    struct Part {
        const Matrix* w;
        Product product;
        float* y;
        int first, groups;  // jobs before; jobs for a slab of tokens

        int group(int job) const { return (job - first) % groups; }
        const uint8_t* weights(int job) const {
            return w->data + (size_t)group(job) * product.together * panel_bytes(*w);
        }
    };

    const Part& part_of(int job) const {
        int i = parts_count_ - 1;
        while (job < parts_[i].first) i--;
        return parts_[i];
    }

    const Cut slabs_;
    const int ldy_;
    const Epilogue epilogue_;
    std::array<Part, MAX_PARTS> parts_;
    int parts_count_ = 0;
};

}  // namespace

void gemm(Team& team, const Matrix& w, const float* x, int ldx, int tokens, float* y, int ldy, Epilogue epilogue,
          const Matrix* then) {
    const Jobs jobs(w, x, ldx, tokens, y, ldy, epilogue);
    const uint8_t* after = nullptr;
    if (then && then->outputs) {
        const Jobs later(*then, x, ldx, tokens, y, ldy, epilogue);
        after = later.weights(team.first(later.count));
    }
    team.each(jobs.count, 1, [&](int job, int next) {
        jobs.run(job, next >= 0 ? jobs.weights(next) : after ? after : jobs.weights(job));
    });
}

void gemm_panel(const Matrix& w, int panel, const float* x, float* sums) {
    const uint8_t* weights = w.data + panel * panel_bytes(w);
    Product(w, x, 0, 1).compute({weights, weights, 1, 0, 1}, sums);
    if (w.bias)
        for (int i = 0; i < std::min(PANEL, w.outputs - panel * PANEL); i++) sums[i] += w.bias[panel * PANEL + i];
}

void gemm_share(const Matrix& w, const float* x, int ldx, int tokens, float* y, int ldy, Epilogue epilogue, int share,
                int shares) {
    const Jobs jobs(w, x, ldx, tokens, y, ldy, epilogue);
    const int last = (int64_t)jobs.count * (share + 1) / shares;
    for (int job = (int64_t)jobs.count * share / shares; job < last; job++)
        jobs.run(job, jobs.weights(std::min(job + 1, last - 1)));
}

size_t packed_bytes(const Matrix& w) { return panels_of(w) * panel_bytes(w); }

bool pack_row(const Matrix& w, int output, const uint8_t* row, uint8_t* packed) {
    const Format& f = format(w.kind);
    uint8_t* at = packed + output / PANEL * panel_bytes(w);
    using Blocks = StoreBlocks<4, 0, true>;
    bool near = w.kind == Q4_1;
    for (int k = 0; k < w.inputs; k += f.block, at += f.bytes) {
        f.write(at, row, k, std::min(f.block, w.inputs - k), output % PANEL);
        near = near && Blocks::is_near(row + k / f.block * Blocks::source);
    }
    return near;
}

void unpack_row(const Matrix& w, int output, float* to) {
    const uint8_t* panel = w.data + output / PANEL * panel_bytes(w);
    float weights[BLOCK * PANEL];
    for (int k = 0; k < w.inputs; k += BLOCK) {
        format(w.kind).expand(panel, k, BLOCK, weights);
        for (int i = 0; i < BLOCK && k + i < w.inputs; i++) to[k + i] = weights[i * PANEL + output % PANEL];
    }
}

}  // namespace paceline::PACELINE_ISA
