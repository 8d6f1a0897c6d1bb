#include "span.h"

#include <algorithm>

namespace paceline {

void Places::fill(Pass& pass) {
    const Span& span = pass.span;
    const int tokens = span.batch * span.width, region = span.offset + span.width;
    for (auto* of_each : {&position_, &row_, &slot_, &prefix_}) of_each->resize(tokens);
    extra_start_.assign(tokens + 1, 0);
    extra_.clear();
    for (int t = 0; t < tokens; t++) {
        const int row = t / span.width, start = (int)span.starts[row], slot = start + span.offset + t % span.width;
        row_[t] = row;
        slot_[t] = slot;
        position_[t] = std::min(span.depths ? start + (int)span.depths[t] : slot, span.context - 1);
        prefix_[t] = span.ancestors ? start : slot + 1;
        for (int node = 0; span.ancestors && node < region; node++)
            if (span.ancestors[(size_t)t * region + node]) extra_.push_back(start + node);
        extra_start_[t + 1] = (int)extra_.size();
    }
    pass.tokens = tokens;
    pass.position = position_.data(), pass.row = row_.data(), pass.slot = slot_.data(), pass.prefix = prefix_.data();
    pass.extra_start = extra_start_.data(), pass.extra = extra_.data();
}

}  // namespace paceline
