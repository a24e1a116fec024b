//! Weights that become floats of another type where they are used, such as those of quantised files.

use forebay_format::{FormatError, TensorType, can_dequantize, dequantize};
use half::slice::HalfFloatSliceExt as _;
use half::{bf16, f16};

/// What weights are in a file, and what they become in a device.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Expansion {
    from: TensorType,
    to: TensorType,
}

/// Elements that are converted at a time: those of any block, and few enough for a cache.
const PART: usize = 8192;

impl Expansion {
    /// Returns the expansion between two types: from one of weights to F32, F16 or BF16.
    pub fn new(from: TensorType, to: TensorType) -> Option<Expansion> {
        let is_float = matches!(to, TensorType::F32 | TensorType::F16 | TensorType::BF16);
        let can = is_float && can_dequantize(from) && from.compact().is_none();
        can.then_some(Expansion { from, to })
    }

    pub fn from(self) -> TensorType {
        self.from
    }

    pub fn to(self) -> TensorType {
        self.to
    }

    /// Returns the bytes of a block in the file and in a device.
    pub fn block(self) -> (u64, u64) {
        let elements = self.from.block_elements();
        (self.from.block_bytes() as u64, (elements * self.to.block_bytes()) as u64)
    }

    /// Decodes whole blocks.
    ///
    /// # Errors
    /// Returns an error if `out` is not as long as these blocks become.
    pub fn decode(self, blocks: &[u8], out: &mut [u8]) -> Result<(), FormatError> {
        let (block, plain) = self.block();
        let per_part = PART / self.from.block_elements();
        let elements = out.len() / self.to.block_bytes();
        if (blocks.len() as u64 / block * plain, blocks.len() as u64 % block)
            != (out.len() as u64, 0)
        {
            let (ty, data_bytes) = (self.from, blocks.len());
            return Err(FormatError::DequantizeLength { ty, data_bytes, elements });
        }
        let mut floats = [0.0_f32; PART];
        let parts = blocks.chunks(per_part * block as usize);
        for (blocks, out) in parts.zip(out.chunks_mut(per_part * plain as usize)) {
            let elements = out.len() / self.to.block_bytes();
            let floats = &mut floats[..elements];
            dequantize(self.from, blocks, floats)?;
            match self.to {
                TensorType::F32 => out.copy_from_slice(bytemuck::cast_slice(floats)),
                TensorType::F16 => {
                    let mut to = [f16::ZERO; PART];
                    to[..elements].convert_from_f32_slice(floats);
                    out.copy_from_slice(bytemuck::cast_slice(&to[..elements]));
                }
                _ => {
                    let mut to = [bf16::ZERO; PART];
                    to[..elements].convert_from_f32_slice(floats);
                    out.copy_from_slice(bytemuck::cast_slice(&to[..elements]));
                }
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn blocks_become_rounded_floats() {
        let mut random = fastrand::Rng::with_seed(4);
        for ty in TensorType::all().iter().copied().filter(|ty| can_dequantize(*ty)) {
            assert_eq!(Expansion::new(ty, TensorType::Q8_0), None);
            let Some(to_bf16) = Expansion::new(ty, TensorType::BF16) else {
                assert!(ty.compact().is_some());
                continue;
            };
            // More than one part, and the last one is not whole.
            let blocks = (2 * PART + 300) / ty.block_elements() + 1;
            let bytes: Vec<u8> = (0..blocks * ty.block_bytes()).map(|_| random.u8(..64)).collect();
            let mut exact = vec![0.0; blocks * ty.block_elements()];
            dequantize(ty, &bytes, &mut exact).unwrap();
            for to in [TensorType::F32, TensorType::F16, TensorType::BF16] {
                let of = Expansion::new(ty, to).unwrap();
                let mut out = vec![9; exact.len() * to.block_bytes()];
                of.decode(&bytes, &mut out).unwrap();
                let expected: Vec<u8> = match to {
                    TensorType::F32 => exact.iter().flat_map(|x| x.to_le_bytes()).collect(),
                    TensorType::F16 => {
                        exact.iter().flat_map(|x| f16::from_f32(*x).to_le_bytes()).collect()
                    }
                    _ => exact.iter().flat_map(|x| bf16::from_f32(*x).to_le_bytes()).collect(),
                };
                assert!(out == expected, "{ty} to {to}");
            }
            let mut out = vec![0; exact.len() * 2];
            assert!(to_bf16.decode(&bytes[1..], &mut out).is_err());
            out.pop();
            assert!(to_bf16.decode(&bytes, &mut out).is_err());
        }
    }
}
