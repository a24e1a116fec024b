//! Tables that give the experts of every token.

use forebay_format::TensorType;

use super::layer::LayerBuilder;
use super::tensors::{Tensors, expect_contiguous, expect_shape};
use crate::ModelError;
use crate::arch::Experts;

impl LayerBuilder<'_> {
    /// Reads the table with the experts of every token `[vocabulary, used]`.
    ///
    /// # Errors
    /// Returns an error if the table is missing, is no table of whole numbers, or names an expert that does not exist or that the
    /// token has already.
    pub(super) fn experts_of_tokens(
        &self,
        tensors: &mut Tensors<'_>,
        experts: &Experts,
    ) -> Result<Vec<u32>, ModelError> {
        let name = self.name("token_experts");
        let table = tensors.whole_numbers(&name, self.architecture.vocabulary, experts.used)?;
        let bad = |token: usize, what: &str| ModelError::BadValue {
            key: name.clone(),
            value: format!("experts of token {token}"),
            expected: what.into(),
        };
        let mut found = Vec::with_capacity(table.len());
        for (token, row) in table.chunks_exact(experts.used).enumerate() {
            for (index, expert) in row.iter().enumerate() {
                let number = u32::try_from(*expert).ok();
                let number = number.filter(|number| (*number as usize) < experts.count);
                let number = number.ok_or_else(|| {
                    bad(token, &format!("they must be from 0 to {}", experts.count - 1))
                })?;
                if row[..index].contains(expert) {
                    return Err(bad(token, "each expert may be there once"));
                }
                found.push(number);
            }
        }
        Ok(found)
    }
}

impl Tensors<'_> {
    /// Reads whole numbers `[rows, cols]`.
    fn whole_numbers(
        &mut self,
        name: &str,
        rows: usize,
        cols: usize,
    ) -> Result<Vec<i64>, ModelError> {
        let tensor = self.find(name)?;
        expect_shape(tensor, &[rows as u64, cols as u64])?;
        expect_contiguous(tensor)?;
        let bytes = self.bytes(tensor.extent)?;
        self.count_bytes(4 * rows as u64 * cols as u64);
        match tensor.ty {
            TensorType::I64 => {
                Ok(bytes.as_chunks().0.iter().map(|bytes| i64::from_le_bytes(*bytes)).collect())
            }
            TensorType::I32 => {
                let numbers = bytes.as_chunks().0.iter();
                Ok(numbers.map(|bytes| i64::from(i32::from_le_bytes(*bytes))).collect())
            }
            other => Err(ModelError::TensorType { name: name.into(), found: other.name() }),
        }
    }
}
