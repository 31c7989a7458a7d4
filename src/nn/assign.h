// DDTREE_ASSIGN(target, expression): the value of a Result into target, or return its Status.
#pragma once

#include <utility>

#define DDTREE_ASSIGN(target, expression)                     \
  do {                                                        \
    auto ddtree_result_ = (expression);                       \
    if (!ddtree_result_.ok()) return ddtree_result_.status(); \
    (target) = std::move(*ddtree_result_);                    \
  } while (0)
