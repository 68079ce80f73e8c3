// Python calls with raw addresses, sizes and type tags, so that one build serves every torch version:
// nothing here knows torch.  An address of 0 is "none".  The Python side (autoshard/ops/native.py)
// checks shapes, types and contiguity before it hands out addresses.
#pragma once

#include <pybind11/pybind11.h>

#include <cstdint>

#include "add_layer_norm.h"

namespace autoshard {

using Address = uintptr_t;

template <class T = void>
T* pointer(Address address) {
  return reinterpret_cast<T*>(address);
}

inline NormShape shape_of(int64_t rows, int64_t hidden, int dtype, int parameter_dtype) {
  return {rows, hidden, static_cast<DType>(dtype), static_cast<DType>(parameter_dtype)};
}

inline NormForward forward_of(Address x, Address residual, Address weight, Address bias, Address y,
                              Address s, Address mean, Address rstd, const NormShape& shape,
                              double eps) {
  NormForward args;
  args.shape = shape;
  args.x = pointer(x);
  args.residual = pointer(residual);
  args.weight = pointer(weight);
  args.bias = pointer(bias);
  args.y = pointer(y);
  args.s = pointer(s);
  args.mean = pointer<float>(mean);
  args.rstd = pointer<float>(rstd);
  args.eps = eps;
  return args;
}

inline NormBackward backward_of(Address dy, Address ds, Address s, Address mean, Address rstd,
                                Address weight, Address dresidual, Address dweight, Address dbias,
                                const NormShape& shape) {
  NormBackward args;
  args.shape = shape;
  args.dy = pointer(dy);
  args.ds = pointer(ds);
  args.s = pointer(s);
  args.mean = pointer<float>(mean);
  args.rstd = pointer<float>(rstd);
  args.weight = pointer(weight);
  args.dresidual = pointer(dresidual);
  args.dweight = pointer(dweight);
  args.dbias = pointer(dbias);
  return args;
}

inline DropoutCall dropout_of(Address x, Address y, int64_t runs, int64_t run, int dtype,
                              const Dropout& dropout) {
  return {runs, run, static_cast<DType>(dtype), pointer(x), pointer(y), dropout};
}

inline void define_dropout(pybind11::module_& module) {
  pybind11::class_<Dropout>(module, "Dropout", pybind11::module_local(),
                            "Scale, threshold and keys of one dropout, and where its rows lie.")
      .def(pybind11::init([](float scale, uint32_t threshold, uint32_t site, Address rng,
                             int64_t sample_elements, int64_t first, int64_t inner_rows,
                             int64_t outer_stride) {
        return Dropout{scale, threshold, site,       pointer<const int64_t>(rng), sample_elements,
                       first, inner_rows, outer_stride};
      }));
}

}  // namespace autoshard
