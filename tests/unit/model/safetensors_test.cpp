// Headers: what is well formed is read exactly, everything else is refused with file and tensor.
#include "model/safetensors.h"

#include <catch2/catch_test_macros.hpp>
#include <catch2/matchers/catch_matchers_string.hpp>
#include <cmath>
#include <cstring>
#include <limits>

#include "base/bf16.h"
#include "support/safetensors_writer.h"

using namespace ddtree;
using namespace ddtree::test;
using Catch::Matchers::ContainsSubstring;
using Catch::Matchers::StartsWith;

namespace {

std::string error_of(std::string_view bytes) {
  Result<std::vector<NamedTensor>> r = parse_safetensors(bytes, "m.safetensors");
  if (!r.ok()) CHECK(r.status().code() == Code::kBadModel);
  return r.ok() ? "accepted" : r.status().message();
}
std::string error_of_header(std::string_view header, size_t data = 16) {
  return error_of(safetensors_bytes(header, std::string(data, '\1')));
}

}  // namespace

TEST_CASE("a well-formed file gives names, types, shapes and bytes") {
  const std::string header =
      R"({"__metadata__":{"format":"pt"},"a":{"dtype":"BF16","shape":[2,3],"data_offsets":[0,12]},"s":{"dtype":"F32","shape":[],"data_offsets":[12,16]},)"
      R"("e":{"dtype":"F16","shape":[0,7],"data_offsets":[16,16]},"q":{"dtype":"F8_E4M3","shape":[1],"data_offsets":[16,17]}})";
  const std::string bytes = safetensors_bytes(header, "ABCDEFGHIJKL\0\0\x80\x3fQ" + std::string());
  const std::string full = safetensors_bytes(header, std::string("ABCDEFGHIJKL\0\0\x80\x3fQ", 17));
  Result<std::vector<NamedTensor>> r = parse_safetensors(full, "m.safetensors");
  REQUIRE(r.status().message() == "");
  REQUIRE(r->size() == 4);
  const NamedTensor& a = (*r)[0];
  CHECK(a.name == "a");
  CHECK(a.view.dtype == DType::kBf16);
  CHECK(a.view.shape == std::vector<int64_t>{2, 3});
  CHECK(a.view.bytes == 12);
  CHECK(std::memcmp(a.view.data, "ABCDEFGHIJKL", 12) == 0);
  CHECK(a.view.elements() == 6);
  CHECK((*r)[1].name == "e");
  CHECK((*r)[1].view.bytes == 0);
  CHECK((*r)[2].view.dtype == DType::kF8E4M3);
  const TensorView& scalar = (*r)[3].view;
  CHECK(scalar.shape.empty());
  float value = 0;
  to_float32(scalar, &value);
  CHECK(value == 1.0f);
  CHECK(error_of(full.substr(0, full.size() - 1)) ==
        "m.safetensors: tensor q: truncated: its bytes end at 17 of the data, but the file holds 16 bytes of data");
}

TEST_CASE("broken lengths") {
  CHECK(error_of("") == "m.safetensors: 0 bytes long, a safetensors file has at least 8");
  CHECK(error_of("1234567") == "m.safetensors: 7 bytes long, a safetensors file has at least 8");
  CHECK(error_of(std::string("\x64\0\0\0\0\0\0\0{}", 10)) == "m.safetensors: truncated: header of 100 bytes, but the file has 10 bytes");
  CHECK_THAT(error_of(std::string("\xff\xff\xff\xff\xff\xff\xff\xff{}", 10)),
             ContainsSubstring("header length 18446744073709551615, at most 100000000 is possible"));
  CHECK_THAT(error_of("version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 5\n"), ContainsSubstring("a git-lfs pointer"));
  CHECK_THAT(error_of("<!DOCTYPE html><html>"), ContainsSubstring("not a safetensors file"));
}

TEST_CASE("broken headers") {
  CHECK_THAT(error_of_header(""), StartsWith("m.safetensors (header): not valid JSON"));
  CHECK_THAT(error_of_header("{"), ContainsSubstring("not valid JSON"));
  CHECK_THAT(error_of_header("[]"), ContainsSubstring("its header is [], expected an object"));
  CHECK_THAT(error_of_header(std::string(100000, '[')), ContainsSubstring("nested deeper than 64 levels"));
  const auto entry = [](const std::string& e) { return error_of_header("{\"w\":" + e + "}"); };
  CHECK(entry(R"({"dtype":"BF16","shape":[8],"data_offsets":[0,16]})") == "accepted");
  CHECK(error_of_header(
            R"({"w":{"dtype":"BF16","shape":[8],"data_offsets":[0,16]},"w":{"dtype":"BF16","shape":[8],"data_offsets":[0,16]}})") ==
        "m.safetensors (header): not valid JSON: the key \"\"w\"\" comes twice");
  CHECK_THAT(error_of_header("{\"" + std::string(5000, 'n') + "\":5}"),
             ContainsSubstring("a tensor name of 5000 bytes, at most 512 are possible"));
  CHECK(entry("5") == "m.safetensors: tensor w: its header entry is 5, expected an object");
  CHECK_THAT(entry(R"({"shape":[8],"data_offsets":[0,16]})"), ContainsSubstring("tensor w: no dtype"));
  CHECK(entry(R"({"dtype":"BF17","shape":[8],"data_offsets":[0,16]})") ==
        "m.safetensors: tensor w: unknown dtype \"BF17\", expected BF16, F16 or F32");
  CHECK_THAT(entry(R"({"dtype":"BF16","data_offsets":[0,16]})"), ContainsSubstring("tensor w: no shape"));
  CHECK(entry(R"({"dtype":"BF16","shape":[-8],"data_offsets":[0,16]})") ==
        "m.safetensors: tensor w: shape [-8] with -8, expected non-negative integers");
  CHECK_THAT(entry(R"({"dtype":"BF16","shape":[8.5],"data_offsets":[0,16]})"), ContainsSubstring("shape [8.5] with 8.5"));
  CHECK_THAT(entry(R"({"dtype":"BF16","shape":[18446744073709551615],"data_offsets":[0,16]})"),
             ContainsSubstring("expected non-negative integers"));
  CHECK_THAT(entry(R"({"dtype":"BF16","shape":[4294967296,4294967296,2],"data_offsets":[0,16]})"),
             ContainsSubstring("needs more than 2^64 bytes"));
  CHECK_THAT(entry(R"({"dtype":"BF16","shape":[9223372036854775807,2],"data_offsets":[0,16]})"),
             ContainsSubstring("needs more than 2^64 bytes"));
  CHECK_THAT(entry(R"({"dtype":"BF16","shape":[1,1,1,1,1,1,1,1,8],"data_offsets":[0,16]})"),
             ContainsSubstring("shape with 9 extents, at most 8"));
  CHECK_THAT(entry(R"({"dtype":"BF16","shape":[8]})"), ContainsSubstring("data_offsets missing, expected [begin, end]"));
  CHECK_THAT(entry(R"({"dtype":"BF16","shape":[8],"data_offsets":[0,16,3]})"), ContainsSubstring("data_offsets [0,16,3]"));
  CHECK_THAT(entry(R"({"dtype":"BF16","shape":[8],"data_offsets":[-16,0]})"), ContainsSubstring("data_offsets [-16,0]"));
  CHECK_THAT(entry(R"({"dtype":"BF16","shape":[8],"data_offsets":[16,0]})"), ContainsSubstring("it ends before it begins"));
  CHECK_THAT(entry(R"({"dtype":"BF16","shape":[8],"data_offsets":[2,18]})"),
             ContainsSubstring("its bytes end at 18 of the data, but the file holds 16"));
  CHECK_THAT(entry(R"({"dtype":"BF16","shape":[8],"data_offsets":[18446744073709551608,18446744073709551615]})"),
             ContainsSubstring("truncated"));
  CHECK(entry(R"({"dtype":"BF16","shape":[7],"data_offsets":[0,16]})") ==
        "m.safetensors: tensor w: 16 bytes of data, but BF16 [7] needs 14");
}

TEST_CASE("every byte of the data belongs to exactly one tensor") {
  const auto header = [](const char* a, const char* b) {
    return std::string(R"({"a":{"dtype":"U8","shape":[4],"data_offsets":)") + a + R"(},"b":{"dtype":"U8","shape":[4],"data_offsets":)" + b +
           "}}";
  };
  CHECK(error_of_header(header("[0,4]", "[4,8]"), 8) == "accepted");
  CHECK(error_of_header(header("[4,8]", "[0,4]"), 8) == "accepted");  // in any order
  CHECK(error_of_header(header("[0,4]", "[4,8]"), 11) ==
        "m.safetensors: 11 bytes of data, but its tensors end at 8: 3 bytes after the last one belong to no tensor; the header is of "
        "another file, or something was appended");
  CHECK(error_of_header(header("[0,4]", "[6,10]"), 10) ==
        "m.safetensors: tensor b: its bytes begin at 6 of the data, but the tensors before it end at 4: 2 bytes belong to no tensor");
  CHECK(error_of_header(header("[8,12]", "[4,8]"), 12) ==
        "m.safetensors: tensor b: its bytes begin at 4 of the data, but the tensors before it end at 0: 4 bytes belong to no tensor");
  CHECK(error_of_header(header("[0,4]", "[2,6]"), 6) ==
        "m.safetensors: tensor b: its bytes begin at 2 of the data, but those up to 4 belong to a");
  CHECK_THAT(error_of_header("{}", 1), ContainsSubstring("1 bytes of data, but its tensors end at 0"));
  CHECK(error_of_header(R"({"__metadata__":{}})", 0) == "accepted");
}

TEST_CASE("unaligned tensors of the three types convert exactly") {
  // A header of odd length puts all data at odd addresses.
  const float values[] = {0.0f, -0.0f, 1.0f, -2.5f, 65504.0f, 0x1p-24f, 0x1p-14f, std::numeric_limits<float>::infinity()};
  const uint16_t half[] = {0x0000, 0x8000, 0x3c00, 0xc100, 0x7bff, 0x0001, 0x0400, 0x7c00};
  std::string data(reinterpret_cast<const char*>(values), sizeof values);
  data.append(reinterpret_cast<const char*>(half), sizeof half);
  uint16_t brain[8];
  for (int i = 0; i < 8; ++i) brain[i] = float_to_bf16(values[i]);
  data.append(reinterpret_cast<const char*>(brain), sizeof brain);
  for (const char* pad : {"", " ", "  "}) {
    const std::string bytes = safetensors_bytes(
        std::string(R"({"a":{"dtype":"F32","shape":[8],"data_offsets":[0,32]},"b":{"dtype":"F16","shape":[2,4],"data_offsets":[32,48]},)") +
            R"("c":{"dtype":"BF16","shape":[8],"data_offsets":[48,64]}})" + pad,
        data);
    Result<std::vector<NamedTensor>> r = parse_safetensors(bytes, "f");
    REQUIRE(r.ok());
    float out[8];
    for (const int which : {0, 1}) {
      to_float32((*r)[static_cast<size_t>(which)].view, out);
      CHECK(std::memcmp(out, values, sizeof values) == 0);  // bits, so that -0 counts
    }
    to_float32((*r)[2].view, out);
    for (int i = 0; i < 8; ++i) CHECK(out[i] == bf16_to_float(brain[i]));
    to_float32((*r)[1].view, 3, 2, out);
    CHECK(out[0] == -2.5f);
    CHECK(out[1] == 65504.0f);
  }
}

TEST_CASE("rounding to BF16 is to nearest, ties to even") {
  const auto bits = [](uint32_t b) { return std::bit_cast<float>(b); };
  CHECK(float_to_bf16(bits(0x3f808000u)) == 0x3f80);  // a tie goes to the even neighbour, below
  CHECK(float_to_bf16(bits(0x3f818000u)) == 0x3f82);  // and above
  CHECK(float_to_bf16(bits(0x3f808001u)) == 0x3f81);
  CHECK(float_to_bf16(bits(0x3f807fffu)) == 0x3f80);
  CHECK(float_to_bf16(bits(0x7f7fffffu)) == 0x7f80);  // the largest float overflows
  CHECK(float_to_bf16(bits(0xff800000u)) == 0xff80);
  CHECK(std::isnan(bf16_to_float(float_to_bf16(bits(0x7f800001u)))));  // a NaN whose payload is cut stays a NaN
  CHECK(std::isnan(bf16_to_float(float_to_bf16(bits(0xffffffffu)))));
  for (uint32_t b = 0; b < 0x10000u; ++b) {
    const float f = bf16_to_float(static_cast<uint16_t>(b));
    if (!std::isnan(f)) REQUIRE(float_to_bf16(f) == b);
  }
}

TEST_CASE("binary16 to float32 agrees with the compiler's own type for every value") {
#ifdef __FLT16_MAX__
  for (uint32_t b = 0; b < 0x10000u; ++b) {
    const uint16_t bits = static_cast<uint16_t>(b);
    const float own = f16_to_float(bits), reference = static_cast<float>(std::bit_cast<_Float16>(bits));
    if (std::isnan(reference)) REQUIRE(std::isnan(own));
    else REQUIRE(std::bit_cast<uint32_t>(own) == std::bit_cast<uint32_t>(reference));
  }
#else
  SKIP("this compiler has no _Float16");
#endif
}
