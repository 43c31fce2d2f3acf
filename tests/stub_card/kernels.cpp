// Ops on the stub card: each runs the CPU's kernel, on the stream that it was launched on, over the same memory.
//
// A library of torch's, loaded after it: it takes the place of all kernels of CUDA but for those that launch
// nothing. Like a kernel of CUDA an op holds none of its tensors: what it reads is there when its turn comes, or
// the numbers are wrong. What has no kernel on the CPU is a fault.

#include <ATen/ATen.h>
#include <ATen/CPUGeneratorImpl.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/cuda/CUDAGeneratorImpl.h>
#include <ATen/ops/copy_native.h>
#include <c10/cuda/CUDAException.h>
#include <c10/cuda/CUDAStream.h>
#include <torch/library.h>

#include <chrono>
#include <functional>
#include <set>
#include <string>
#include <thread>
#include <vector>

extern "C" {
void stub_card_fault(const char* text);
int64_t stub_card_op_delay_us();
}

namespace {

using at::IValue;
using at::Tensor;
using c10::OperatorHandle;
using torch::jit::Stack;

// They launch nothing, or take no part of it from the CPU.
const std::set<std::string> kOwn = {
    "aten::empty", "aten::empty_strided", "aten::resize_", "aten::set_", "aten::record_stream", "aten::copy_",
    "aten::_local_scalar_dense", "aten::_pin_memory", "aten::is_pinned", "aten::is_set_to", "aten::_copy_from",
    "aten::_copy_from_and_resize", "aten::_foreach_copy_", "aten::_efficientzerotensor", "aten::_fused_sdp_choice",
};

bool is_view(const c10::FunctionSchema& schema) {
  for (auto& each : schema.returns()) {
    if (each.alias_info() && !each.alias_info()->isWrite()) return true;
  }
  return false;
}

// `change` of every tensor in a value.
IValue mapped(const IValue& value, const std::function<Tensor(const Tensor&)>& change) {
  if (value.isTensor()) return value.toTensor().defined() ? IValue(change(value.toTensor())) : value;
  if (value.isTensorList()) {
    c10::List<Tensor> made;
    for (const Tensor& each : value.toTensorVector()) made.push_back(change(each));
    return made;
  }
  if (value.isOptionalTensorList()) {
    c10::List<std::optional<Tensor>> made;
    for (const std::optional<Tensor>& each : value.toOptionalTensorList()) {
      made.push_back(each && each->defined() ? std::optional<Tensor>(change(*each)) : std::nullopt);
    }
    return made;
  }
  return value;
}

void keep_what_it_is(const Tensor& from, const Tensor& to) {
  if (from.unsafeGetTensorImpl()->is_wrapped_number()) to.unsafeGetTensorImpl()->set_wrapped_number(true);
}

Tensor on_meta(const Tensor& tensor) {
  if (tensor.is_cpu() && tensor.dim() == 0) return tensor;
  Tensor made = at::empty_strided(tensor.sizes(), tensor.strides(), tensor.options().device(at::kMeta));
  keep_what_it_is(tensor, made);
  return made;
}

// The same memory, held by nobody; a tensor of the CPU as it is now.
Tensor on_cpu(const Tensor& tensor) {
  Tensor made = tensor.is_cpu() ? tensor.clone()
                                : at::from_blob(tensor.data_ptr(), tensor.sizes(), tensor.strides(),
                                                tensor.options().device(at::kCPU));
  keep_what_it_is(tensor, made);
  return made;
}

// Numbers that follow from those that the card's generator would give.
at::Generator cpu_generator(const std::optional<at::Generator>& given) {
  auto card = given && given->defined() ? *given : at::cuda::detail::getDefaultCUDAGenerator();
  std::lock_guard<std::mutex> lock(card.mutex());
  uint64_t seed = card.current_seed() * 1000003 + card.get_offset();
  card.set_offset(card.get_offset() + 4);
  return at::detail::createCPUGenerator(seed);
}

// What a kernel writes; a tensor of the CPU it would write a copy of.
void is_on_card(const OperatorHandle& op, const Tensor& tensor) {
  if (tensor.is_cpu()) stub_card_fault((op.schema().name() + " writes to a tensor of the CPU").c_str());
}

void to_the_cpu(const OperatorHandle& op, Stack& stack) {
  auto& arguments = op.schema().arguments();
  for (size_t i = 0; i < arguments.size(); ++i) {
    if (arguments[i].type()->isSubtypeOf(*c10::OptionalType::create(c10::GeneratorType::get()))) {
      auto given = stack[i].isNone() ? std::nullopt : std::optional<at::Generator>(stack[i].toGenerator());
      stack[i] = cpu_generator(given);
    } else if (stack[i].isDevice()) {
      stack[i] = c10::Device(at::kCPU);
    } else {
      auto* alias = arguments[i].alias_info();
      if (alias && alias->isWrite()) mapped(stack[i], [&](const Tensor& t) { return is_on_card(op, t), t; });
      stack[i] = mapped(stack[i], on_cpu);
    }
  }
}

void native_dropout(const OperatorHandle&, Stack& stack, const at::Generator& generator) {
  Tensor input = stack[0].toTensor();
  double p = stack[1].toDouble();
  Tensor kept = at::empty_like(input, at::kBool).bernoulli_(1 - p, generator);
  stack = {p == 1 ? at::zeros_like(input) : input * kept / (1 - p), kept};
}

using Work = std::function<void(Stack&)>;

struct Launch {
  std::string name;
  Work work;
  Stack arguments;
  std::vector<std::pair<size_t, Tensor>> results;  // the memory of those that are new
};

void run(void* data) {
  std::unique_ptr<Launch> launch(static_cast<Launch*>(data));
  if (int64_t delay = stub_card_op_delay_us()) std::this_thread::sleep_for(std::chrono::microseconds(delay));
  at::NoGradGuard no_grad;
  at::AutoDispatchBelowADInplaceOrView below;
  try {
    launch->work(launch->arguments);
    for (auto& [i, memory] : launch->results) memory.copy_(launch->arguments[i].toTensor());
  } catch (const std::exception& error) {
    stub_card_fault((launch->name + ": " + error.what()).c_str());
  }
}

void launch(std::unique_ptr<Launch> launch) {
  C10_CUDA_CHECK(cudaLaunchHostFunc(c10::cuda::getCurrentCUDAStream(), run, launch.release()));
  C10_CUDA_KERNEL_LAUNCH_CHECK();  // it raises what some call before it has left, as of any kernel
}

Work work_of(const OperatorHandle& op) {
  if (op.schema().name() == "aten::native_dropout") {
    at::Generator generator = cpu_generator(std::nullopt);
    return [op, generator](Stack& stack) { native_dropout(op, stack, generator); };
  }
  return [op](Stack& stack) { op.callBoxed(&stack); };
}

// The argument that a result is, or -1 for a new one.
int64_t argument_of(const c10::FunctionSchema& schema, size_t result) {
  auto* alias = schema.returns()[result].alias_info();
  if (!alias) return -1;
  for (size_t i = 0; i < schema.arguments().size(); ++i) {
    auto* other = schema.arguments()[i].alias_info();
    if (other && other->beforeSets() == alias->beforeSets()) return int64_t(i);
  }
  return -1;
}

// At once, for what is no tensor or has a size that data decides.
void run_now(const OperatorHandle& op, Stack& arguments, Stack* stack) {
  Work work = work_of(op);
  Stack at_hand = arguments;
  to_the_cpu(op, at_hand);
  C10_CUDA_CHECK(cudaStreamSynchronize(c10::cuda::getCurrentCUDAStream()));
  {
    at::NoGradGuard no_grad;
    at::AutoDispatchBelowADInplaceOrView below;
    work(at_hand);
  }
  for (size_t i = 0; i < at_hand.size(); ++i) {
    int64_t same = argument_of(op.schema(), i);
    stack->push_back(same >= 0 ? arguments[size_t(same)]
                               : mapped(at_hand[i], [](const Tensor& t) { return t.to(at::kCUDA); }));
  }
}

void on_the_card(const OperatorHandle& op, c10::DispatchKeySet, Stack* stack) {
  auto& schema = op.schema();
  Stack arguments = torch::jit::pop(*stack, schema.arguments().size()), results;
  bool is_new = false, is_tensors = true, has_out = false;
  for (size_t i = 0; i < schema.returns().size(); ++i) {
    is_new |= argument_of(schema, i) < 0;
    is_tensors &= schema.returns()[i].type()->kind() == c10::TypeKind::TensorType;
  }
  for (auto& each : schema.arguments()) has_out |= each.is_out();
  if (is_new && !is_tensors) return run_now(op, arguments, stack);
  if (is_new || has_out) {
    for (auto& each : arguments) {
      results.push_back(each.isDevice() ? IValue(c10::Device(at::kMeta)) : mapped(each, on_meta));
    }
    try {
      op.callBoxed(&results);
    } catch (const c10::OutOfMemoryError&) {
      throw;
    } catch (const c10::Error&) {
      return run_now(op, arguments, stack);
    }
  }
  auto made = std::make_unique<Launch>();
  made->name = schema.name();
  made->work = work_of(op);
  for (size_t i = 0; i < schema.returns().size(); ++i) {
    int64_t same = argument_of(schema, i);
    if (same >= 0) {
      IValue& given = arguments[size_t(same)];
      if (has_out && given.isTensor()) given.toTensor().resize_(results[i].toTensor().sizes());
      stack->push_back(given);
      continue;
    }
    Tensor like = results[i].toTensor();
    if (!like.defined()) {
      stack->push_back(like);
      continue;
    }
    Tensor result = at::empty_strided(like.sizes(), like.strides(), like.options().device(at::kCUDA));
    if (result.numel()) made->results.emplace_back(i, on_cpu(result));
    stack->push_back(result);
  }
  made->arguments = arguments;
  to_the_cpu(op, made->arguments);
  launch(std::move(made));
}

// What CUDA copies by itself is its own; what it has a kernel for is run as one.
Tensor& copy_(Tensor& self, const Tensor& source, bool non_blocking) {
  bool alike = self.dtype() == source.dtype() && self.strides() == source.strides() &&
      self.sizes() == source.sizes() && self.is_non_overlapping_and_dense();
  if (!self.is_cuda() || !source.is_cuda() || alike) return at::native::copy_(self, source, non_blocking);
  auto made = std::make_unique<Launch>();
  made->name = "aten::copy_";
  Tensor to = on_cpu(self), from = on_cpu(source);
  made->work = [to, from](Stack&) mutable { to.copy_(from); };
  launch(std::move(made));
  return self;
}

void foreach_copy_(at::TensorList self, at::TensorList source, bool non_blocking) {
  for (size_t i = 0; i < self.size(); ++i) self[i].copy_(source[i], non_blocking);
}

int64_t math_alone(
    const Tensor&, const Tensor&, const Tensor&, const std::optional<Tensor>&, double, bool, std::optional<double>,
    bool) {
  return 0;
}

TORCH_LIBRARY_IMPL(aten, CUDA, library) {
  auto& dispatcher = c10::Dispatcher::singleton();
  for (auto& name : dispatcher.getRegistrationsForDispatchKey(c10::DispatchKey::CUDA)) {
    auto op = dispatcher.findSchema(name);
    if (!op || name.name.rfind("aten::", 0) != 0 || kOwn.count(name.name) || is_view(op->schema())) continue;
    std::string full = name.name + (name.overload_name.empty() ? "" : "." + name.overload_name);
    library.impl(full.c_str(), torch::CppFunction::makeFromBoxedFunction<&on_the_card>());
  }
  library.impl("copy_", copy_);
  library.impl("_foreach_copy_", foreach_copy_);
  library.impl("_fused_sdp_choice", math_alone);
}

}  // namespace
