#include "span.h"

#include <algorithm>

namespace paceline {

void Places::fill(Pass& pass) {
    const Span& span = pass.span;
    const int region = span.offset + span.width;
    const auto count = [&](int row) { return span.counts ? (int)span.counts[row] : span.width; };
    pass.tokens = 0;
    for (int row = 0; row < span.batch; row++) pass.tokens += count(row);
    ids_.resize(pass.tokens);
    for (auto* of_each : {&position_, &row_, &slot_, &prefix_}) of_each->resize(pass.tokens);
    extra_start_.assign(pass.tokens + 1, 0);
    extra_.clear();
    for (int row = 0, t = 0; row < span.batch; row++) {
        const int start = (int)span.starts[row];
        for (int i = 0; i < count(row); i++, t++) {
            const size_t node = (size_t)row * span.width + i;
            const int slot = start + span.offset + i;
            if (pass.entry.ids) ids_[t] = pass.entry.ids[node];
            row_[t] = row;
            slot_[t] = slot;
            position_[t] = std::min(span.depths ? start + (int)span.depths[node] : slot, span.context - 1);
            prefix_[t] = span.ancestors ? start : slot + 1;
            for (int other = 0; span.ancestors && other < region; other++)
                if (span.ancestors[node * region + other]) extra_.push_back(start + other);
            extra_start_[t + 1] = (int)extra_.size();
        }
    }
    if (pass.entry.ids) pass.entry.ids = ids_.data();
    pass.position = position_.data(), pass.row = row_.data(), pass.slot = slot_.data(), pass.prefix = prefix_.data();
    pass.extra_start = extra_start_.data(), pass.extra = extra_.data();
}

}  // namespace paceline
