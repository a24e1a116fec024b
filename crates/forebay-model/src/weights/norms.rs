//! Norms of the residual stream.

use forebay_compute::NormForm;

use super::tensors::Tensors;
use crate::ModelError;

impl Tensors<'_> {
    /// Reads a norm of rows of `length` elements: as many weights as [`NormForm::weights`] says. A layer norm whose biases the file lacks
    /// has zeros. Families without weights of norms have ones.
    ///
    /// # Errors
    /// Returns an error if the weights are missing, or if a vector has another length or cannot be read.
    pub(super) fn stream_norm(
        &mut self,
        form: NormForm,
        name: &str,
        length: usize,
    ) -> Result<Vec<f32>, ModelError> {
        let mut weights = match self.names().has_norm_weights() {
            true => self.norm(name, length)?,
            false => self.ones(length),
        };
        if form == NormForm::Layer {
            match self.optional_bias(name, length)? {
                Some(bias) => weights.extend(bias),
                None => weights.extend(self.zeros(length)),
            }
        }
        Ok(weights)
    }

    /// Reads the bias that belongs to the weight `name`, if the file has it.
    ///
    /// # Errors
    /// Returns an error if it has another length or cannot be read.
    pub(super) fn optional_bias(
        &mut self,
        name: &str,
        length: usize,
    ) -> Result<Option<Vec<f32>>, ModelError> {
        match name.strip_suffix("weight") {
            Some(stem) => self.optional_vector(&format!("{stem}bias"), length),
            None => Ok(None),
        }
    }
}
