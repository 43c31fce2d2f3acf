// A CUDA device without memory or kernels, for tracing as on a card on a machine that has none.
//
// torch asks three places about a device: its guard (current device, streams, events), the hooks of
// its library (is it there?), and, for attention, a function that chooses a kernel. Here all three
// answer as a machine with one card would, and do nothing. Fake tensors, which have no memory
// either, then go through autograd, autocast and optimizers as they do beside a card.
//
// torch asks for the hooks once and keeps them, so `take_over_cuda` makes the object that it keeps
// behave as one of these. They have no data. The process is meant for a trace and then ends.

#include <ATen/Context.h>
#include <ATen/native/DispatchStub.h>
#include <ATen/native/transformers/attention.h>

#include "absent_card.h"

#include <cmath>
#include <cstdint>
#include <cstring>
#include <optional>
#include <vector>

namespace {

// What decides on the kernel of an attention, told by numbers; see `capture/offline/card_attention.py`.
enum Fact {
  kDtype, kQueryWidth, kKeyWidth, kValueWidth, kSquare, kEmpty, kGrouped, kMask, kMaskGrad, kGrad,
  kDropout, kCausal, kDense, kSixteenths, kOneQuery, kOneKey, kDeterministic, kFacts
};
using Choose = int64_t (*)(const int64_t* facts, const int64_t* order);
Choose chooser = nullptr;

// The kernels that the user allows, in the order in which they are asked; -1 stands for another.
void tell_order(int64_t* told) {
  auto& context = at::globalContext();
  for (const at::SDPBackend kernel : context.sDPPriorityOrder()) {
    const bool allowed =
        kernel == at::SDPBackend::flash_attention       ? context.userEnabledFlashSDP()
        : kernel == at::SDPBackend::efficient_attention ? context.userEnabledMemEfficientSDP()
        : kernel == at::SDPBackend::cudnn_attention     ? context.userEnabledCuDNNSDP()
        : kernel == at::SDPBackend::math                ? context.userEnabledMathSDP()
                                                        : false;
    *told++ = allowed ? static_cast<int64_t>(kernel) : -1;
  }
}

int64_t choose_attention(
    const at::Tensor& query, const at::Tensor& key, const at::Tensor& value,
    const std::optional<at::Tensor>& mask, double dropout, bool is_causal, std::optional<double>,
    bool) {
  const bool has_mask = mask.has_value() && mask->defined();
  const auto is = [](const c10::SymBool& known) { return known.guard_or_false(__FILE__, __LINE__); };
  const auto width = [](const at::Tensor& t) {
    return t.sym_size(-1).guard_int(__FILE__, __LINE__);
  };
  const auto dense = [&](const at::Tensor& t) { return is(t.sym_stride(-1).sym_eq(1)); };
  const auto one = [&](const at::Tensor& t) { return is(t.sym_size(-2).sym_eq(1)); };
  const auto empty = [&](const at::Tensor& t) { return is(t.sym_numel().sym_eq(0)); };
  int64_t facts[kFacts];
  facts[kDtype] = static_cast<int64_t>(query.scalar_type());
  facts[kQueryWidth] = width(query);
  facts[kKeyWidth] = width(key);
  facts[kValueWidth] = width(value);
  facts[kSquare] = is(query.sym_size(-2).sym_eq(key.sym_size(-2)));
  facts[kEmpty] = empty(query) || empty(key);
  facts[kGrouped] = query.dim() == 4 && !is(query.sym_size(1).sym_eq(key.sym_size(1)));
  facts[kMask] = has_mask;
  facts[kMaskGrad] = has_mask && mask->requires_grad();
  facts[kGrad] = query.requires_grad() || key.requires_grad() || value.requires_grad();
  facts[kDropout] = dropout > 0;
  facts[kCausal] = is_causal;
  facts[kDense] = dense(query) && dense(key) && dense(value) && (!has_mask || dense(*mask));
  facts[kSixteenths] = dropout * 16 == std::floor(dropout * 16);
  facts[kOneQuery] = one(query);
  facts[kOneKey] = one(key);
  const auto& context = at::globalContext();
  facts[kDeterministic] =
      context.deterministicAlgorithms() && !context.deterministicAlgorithmsWarnOnly();
  int64_t order[at::num_sdp_backends];
  tell_order(order);
  return chooser(facts, order);
}

}  // namespace

// Until the process ends there is a CUDA device, and `choose` decides on attention, from kernels in
// the `order` that a card has until the user sets another.
extern "C" void take_over_cuda(Choose choose, const int64_t* order, int kernels) {
  chooser = choose;
  at::globalContext().setSDPPriorityOrder(std::vector<int64_t>(order, order + kernels));
  c10::impl::DeviceGuardImplRegistrar(c10::DeviceType::CUDA, new absent_card::Guard());
  static const absent_card::Hooks hooks;
  auto& kept = const_cast<at::CUDAHooksInterface&>(at::detail::getCUDAHooks());
  std::memcpy(static_cast<void*>(&kept), static_cast<const void*>(&hooks), sizeof(void*));
  at::native::_fused_sdp_choice_stub.set_cuda_dispatch_ptr(&choose_attention);
}
