//! Floating-point types, and their parts.

/// A floating-point type of weights. Bytes are little-endian.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Float {
    Bf16,
    F16,
    F8E4M3,
    F8E5M2,
}

impl Float {
    pub const ALL: [Float; 4] = [Float::Bf16, Float::F16, Float::F8E4M3, Float::F8E5M2];

    /// Returns the number by which files name the type.
    pub const fn number(self) -> u8 {
        match self {
            Float::Bf16 => 0,
            Float::F16 => 1,
            Float::F8E4M3 => 2,
            Float::F8E5M2 => 3,
        }
    }

    pub fn from_number(number: u8) -> Option<Float> {
        Float::ALL.into_iter().find(|float| float.number() == number)
    }

    /// Returns the number of bytes of a weight.
    pub const fn bytes(self) -> usize {
        match self {
            Float::Bf16 | Float::F16 => 2,
            Float::F8E4M3 | Float::F8E5M2 => 1,
        }
    }

    pub const fn exponent_bits(self) -> u32 {
        match self {
            Float::Bf16 => 8,
            Float::F16 | Float::F8E5M2 => 5,
            Float::F8E4M3 => 4,
        }
    }

    pub const fn mantissa_bits(self) -> u32 {
        8 * self.bytes() as u32 - 1 - self.exponent_bits()
    }

    /// Returns the number of bits of sign and mantissa together.
    pub const fn rest_bits(self) -> u32 {
        1 + self.mantissa_bits()
    }

    /// Returns the exponent of a weight, and its sign and mantissa: the sign is above the mantissa.
    #[inline(always)]
    pub(crate) const fn split(self, weight: u16) -> (u8, u16) {
        let (exponent, mantissa) = (self.exponent_bits(), self.mantissa_bits());
        let of_exponent = (weight >> mantissa) & ((1 << exponent) - 1);
        let sign = weight >> (exponent + mantissa);
        (of_exponent as u8, sign << mantissa | weight & ((1 << mantissa) - 1))
    }

    /// Puts together what [`Float::split`] takes apart.
    #[inline(always)]
    pub(crate) const fn join(self, exponent: u8, rest: u16) -> u16 {
        let (bits, mantissa) = (self.exponent_bits(), self.mantissa_bits());
        let sign = rest >> mantissa;
        sign << (bits + mantissa) | (exponent as u16) << mantissa | rest & ((1 << mantissa) - 1)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_weight_is_its_parts() {
        for float in Float::ALL {
            let most = if float.bytes() == 2 { u16::MAX } else { 255 };
            for weight in 0..=most {
                let (exponent, rest) = float.split(weight);
                assert!(u32::from(exponent) < 1 << float.exponent_bits());
                assert!(u32::from(rest) < 1 << float.rest_bits());
                assert_eq!(float.join(exponent, rest), weight, "{float:?}");
            }
        }
    }

    #[test]
    fn parts_are_those_of_the_type() {
        // -1.5 is 1.1 in binary, with exponent 0.
        assert_eq!(Float::Bf16.split(half::bf16::from_f32(-1.5).to_bits()), (127, 0x80 | 0x40));
        assert_eq!(Float::F16.split(half::f16::from_f32(-1.5).to_bits()), (15, 0x400 | 0x200));
        assert_eq!(Float::F8E4M3.split(0b1011_1100), (7, 0b1100));
        assert_eq!(Float::F8E5M2.split(0b1011_1110), (15, 0b110));
    }
}
