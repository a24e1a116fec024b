//! Tables that give the experts of every token.

use forebay_format::TensorType;

use super::layer::LayerBuilder;
use super::tensors::Tensors;
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
        let shape = [self.architecture.vocabulary, experts.used];
        let table = tensors.integers(&name, &shape, &[TensorType::I64, TensorType::I32])?;
        tensors.count_bytes(4 * table.len() as u64);
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
