//! NF4 of bitsandbytes.

use forebay_format::TensorType;
use forebay_format::quantized::{Form, Nf4Scales};
use serde::Deserialize;

use super::{MatrixSource, Stored};
use crate::ModelError;
use crate::weights::tensors::{expect_contiguous, expect_type};

/// The description of an NF4 matrix that lies beside its codes, as JSON.
#[derive(Deserialize)]
struct Nf4State {
    blocksize: usize,
    shape: Vec<usize>,
    nested_blocksize: Option<usize>,
    nested_offset: Option<f32>,
}

impl Stored<'_> {
    /// NF4 of bitsandbytes, with plain scales or with scales that are quantised once more.
    pub(super) fn nf4(&self) -> Result<MatrixSource, ModelError> {
        const STATE: &str = "weight.quant_state.bitsandbytes__nf4";
        let (rows, cols) = (self.rows, self.cols);
        let described = self.tensors.find(&self.name(STATE))?;
        expect_type(described, &[TensorType::U8])?;
        expect_contiguous(described)?;
        let text = self.tensors.bytes(described.extent)?;
        let state: Nf4State = serde_json::from_slice(&text)
            .map_err(|error| self.unusable(STATE, error.to_string(), "it must describe NF4"))?;
        if state.shape != [rows, cols] {
            let expected = format!("the matrix has the shape [{rows}, {cols}]");
            return Err(self.unusable(STATE, format!("shape {:?}", state.shape), &expected));
        }
        let (elements, block) = (rows.checked_mul(cols).unwrap_or(0), state.blocksize);
        if block == 0 || elements == 0 || !elements.is_multiple_of(2) {
            let expected = "blocks have elements, and matrices have an even number of them";
            return Err(self.unusable(STATE, format!("blocksize {block}"), expected));
        }
        let scales = elements.div_ceil(block);
        let values = self.tensor("weight.quant_map", &[TensorType::F32], &[16])?;
        let codes = self.tensor("weight", &[TensorType::U8], &[elements / 2, 1])?;
        let absmax = |ty| self.tensor("weight.absmax", &[ty], &[scales]);
        let (form, extents) = match (state.nested_blocksize, state.nested_offset) {
            (None, _) => (Nf4Scales::Plain, vec![codes, absmax(TensorType::F32)?, values]),
            (Some(outer), Some(offset)) if outer > 0 && offset.is_finite() => {
                let of_scales = self.tensor(
                    "weight.nested_absmax",
                    &[TensorType::F32],
                    &[scales.div_ceil(outer)],
                )?;
                let map = self.tensor("weight.nested_quant_map", &[TensorType::F32], &[256])?;
                let form = Nf4Scales::Nested { block: outer, offset: offset.to_bits() };
                (form, vec![codes, absmax(TensorType::U8)?, values, of_scales, map])
            }
            (Some(outer), offset) => {
                let said = format!("nested_blocksize {outer} and nested_offset {offset:?}");
                let expected = "the first must be above 0, and the second a number";
                return Err(self.unusable(STATE, said, expected));
            }
        };
        let read: u64 = extents.iter().map(|extent| extent.length).sum();
        if read > 4 * elements as u64 {
            let expected = "forebay knows matrices that are larger than their tables";
            return Err(self.unusable("weight", format!("of {elements} elements"), expected));
        }
        Ok(self.source(Form::Nf4 { block, scales: form }, TensorType::F32, extents))
    }
}
