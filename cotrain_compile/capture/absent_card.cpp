// A CUDA device without memory or kernels, for tracing as on a card on a machine that has none.
//
// torch asks three places about a device: its guard (current device, streams, events), the hooks of
// its library (is it there?), and, for attention, a function that chooses a kernel. Here all three
// answer as a machine with one card would, and do nothing. Fake tensors, which have no memory
// either, then go through autograd, autocast and optimizers as they do beside a card.
//
// torch asks for the hooks once and keeps them, so `take_over_cuda` makes the object that it keeps
// behave as one of these. They have no data. The process is meant for a trace and then ends.

#include <ATen/detail/CUDAHooksInterface.h>
#include <ATen/native/DispatchStub.h>
#include <ATen/native/transformers/attention.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>

#include <cstdint>
#include <cstring>
#include <optional>

namespace {

const c10::Device kCard(c10::DeviceType::CUDA, 0);
const c10::Stream kStream(c10::Stream::DEFAULT, kCard);

struct Guard final : c10::impl::DeviceGuardImplInterface {
  static constexpr c10::DeviceType static_type = c10::DeviceType::CUDA;

  c10::DeviceType type() const override { return static_type; }
  c10::DeviceIndex deviceCount() const noexcept override { return 1; }

  c10::Device getDevice() const override { return kCard; }
  c10::Device exchangeDevice(c10::Device) const override { return kCard; }
  void setDevice(c10::Device) const override {}
  void uncheckedSetDevice(c10::Device) const noexcept override {}

  c10::Stream getStream(c10::Device) const noexcept override { return kStream; }
  c10::Stream getDefaultStream(c10::Device) const override { return kStream; }
  c10::Stream getNewStream(c10::Device, int) const override { return kStream; }
  c10::Stream exchangeStream(c10::Stream) const noexcept override { return kStream; }
  bool queryStream(const c10::Stream&) const override { return true; }
  void synchronizeStream(const c10::Stream&) const override {}

  void record(void**, const c10::Stream&, c10::DeviceIndex, c10::EventFlag) const override {}
  void block(void*, const c10::Stream&) const override {}
  bool queryEvent(void*) const override { return true; }
  void synchronizeEvent(void*) const override {}
  void destroyEvent(void*, c10::DeviceIndex) const noexcept override {}
};

struct Hooks final : at::CUDAHooksInterface {
  void init() const override {}
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasCUDA() const override { return true; }
  bool hasPrimaryContext(c10::DeviceIndex) const override { return true; }
  c10::DeviceIndex current_device() const override { return 0; }
  c10::DeviceIndex getCurrentDevice() const override { return 0; }
  c10::DeviceIndex deviceCount() const override { return 1; }
  int getNumGPUs() const override { return 1; }
  void deviceSynchronize(c10::DeviceIndex) const override {}
};

// What decides on the kernel of an attention, told by numbers; see `capture/card_attention.py`.
enum Fact {
  kDtype, kQueryWidth, kKeyWidth, kValueWidth, kSquare, kEmpty, kGrouped, kMask, kMaskGrad, kGrad,
  kDropout, kCausal, kDense, kFacts
};
using Choose = int64_t (*)(const int64_t* facts);
Choose chooser = nullptr;

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
  return chooser(facts);
}

}  // namespace

// Until the process ends there is a CUDA device, and `choose` decides on attention.
extern "C" void take_over_cuda(Choose choose) {
  chooser = choose;
  c10::impl::DeviceGuardImplRegistrar(c10::DeviceType::CUDA, new Guard());
  static const Hooks hooks;
  auto& kept = const_cast<at::CUDAHooksInterface&>(at::detail::getCUDAHooks());
  std::memcpy(static_cast<void*>(&kept), static_cast<const void*>(&hooks), sizeof(void*));
  at::native::_fused_sdp_choice_stub.set_cuda_dispatch_ptr(&choose_attention);
}
