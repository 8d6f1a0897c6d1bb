// Where the tokens of a pass stand.
#pragma once

#include <vector>

#include "native.h"

namespace paceline {

class Places {  // memory for what a pass says of its tokens
  public:
    void fill(Pass& pass);  // from its span; valid until the next one

  private:
    std::vector<int64_t> ids_;
    std::vector<int32_t> position_, row_, slot_, prefix_, extra_start_, extra_;
};

}  // namespace paceline
