// The op tests of a card: every call runs on the CPU backend with BF16 boundaries and on each kind of kernels that the card has, from the
// same fresh random values, and what they wrote is compared. Only the public interface of ops::Backend is used: pools, scratch, states and
// traces are read through the ops that read them.
#pragma once

#include <catch2/catch_test_macros.hpp>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "base/bf16.h"
#include "ops/backend.h"
#include "support/op_values.h"

namespace ddtree::ops::gpu_test {

using testing::Floats;
using testing::HostWeight;
using testing::Random;

uint64_t seed();          // of this run: DDTREE_SEED, or a fresh one
std::string seed_text();  // for INFO: how to run the same values again

// One thing on every backend, the CPU's first.
template <class T>
class Each {
 public:
  T& operator[](size_t i) { return values_[i]; }
  const T& operator[](size_t i) const { return values_[i]; }
  void push_back(T value) { values_.push_back(std::move(value)); }

 private:
  std::vector<T> values_;
};

// What an op writes: a view inside a larger tensor, poisoned before the op, so that a value not written and one written beside the view
// are both seen.
struct Output {
  int64_t rows = 0, cols = 0;
  bool float32 = false;  // else an activation, which the card rounds to BF16
  Each<Tensor> whole, view;
};

class Twins {
 public:
  // Skips the test where there is no card.
  explicit Twins(int64_t max_rows, int64_t max_positions = 64, int64_t max_linear_inputs = 64);
  ~Twins();
  Twins(const Twins&) = delete;

  size_t count() const { return backends_.size(); }  // 2 or 3
  Backend& at(size_t i) const { return *backends_[i]; }
  template <class F>
  void each(const F& f) const {
    for (size_t i = 0; i < count(); ++i) f(at(i), i);
  }
  // f(backend) gives a Result.
  template <class F>
  auto make(const F& f) const {
    Each<std::decay_t<decltype(*f(at(0)))>> made;
    each([&](Backend& b, size_t) {
      auto r = f(b);
      INFO(b.name() << ": " << r.status().message());
      if (!r.ok() && r.status().code() == Code::kDoesNotFit) SKIP(r.status().message());
      REQUIRE(r.ok());
      made.push_back(*std::move(r));
    });
    return made;
  }
  Each<Tensor> activations(int64_t rows, int64_t cols) const;  // zeros
  Each<Tensor> activations(const Floats& values, int64_t rows, int64_t cols) const;
  Each<Tensor> constants(const Floats& values, int64_t rows, int64_t cols) const;  // float32
  void upload(const Floats& values, const Each<Tensor>& to) const;
  Output output(int64_t rows, int64_t cols, bool float32 = false) const;

  // The view's values on one backend. Fails the test if anything was left unwritten, is not finite, or was written beside the view.
  Floats read(const std::string& what, const Output& out, size_t i) const;

  // Each card against the CPU: ‖got - want‖ <= limit · ‖want‖ over the tensor and, with twice the limit, over each row. `limit` says what
  // the order of float32 sums and the card's functions explain; where the card rounds to BF16 a few values near the middle between two
  // neighbours may go the other way besides, which 2^-5 / √n allows for (four values of n by a whole step). 0: the same bits.
  // A row's error stands against the mean size of `together` rows: its own may happen to be next to nothing.
  void compare(const std::string& what, const Output& out, double limit, int64_t together = 1) const;

 private:
  std::vector<std::unique_ptr<Backend>> backends_;
};

inline Each<Tensor> rows_of(const Each<Tensor>& t, size_t count, int64_t first, int64_t rows) {
  Each<Tensor> out;
  for (size_t i = 0; i < count; ++i) out.push_back(t[i].row_range(first, rows));
  return out;
}
inline Each<Tensor> cols_of(const Each<Tensor>& t, size_t count, int64_t first, int64_t cols) {
  Each<Tensor> out;
  for (size_t i = 0; i < count; ++i) out.push_back(t[i].col_range(first, cols));
  return out;
}

}  // namespace ddtree::ops::gpu_test
