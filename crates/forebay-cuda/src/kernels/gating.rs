//! The gated activation of feed-forwards.

use super::elementwise::{GRID_Y_MAX, THREADS, blocks};
use crate::launch::Launch;
use crate::{CudaError, DevicePtr, Gpu};

/// How a gate acts on `up`, as on the CPU.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Gating {
    /// `silu(g) * u`
    Silu,
    /// `gelu(g) * u`, by the approximation with tanh.
    GeluTanh,
    /// `(u + 1) * g / (1 + e^(-alpha g))`, where `g` is at most `limit` and `u` is within `-limit..limit`.
    Clamped { alpha: f32, limit: f32 },
}

/// Biases of experts, added before the gating.
#[derive(Clone, Copy)]
pub struct GateBiases {
    /// `[experts, width]`, as `up`.
    pub gate: DevicePtr<f32>,
    pub up: DevicePtr<f32>,
    /// Experts of rows, or, with `pairs`, of pairs. Their slots may be found by other numbers.
    pub ids: DevicePtr<u32>,
    /// Which pair a row is: row r belongs to `ids[pairs[r]]`. Null: to `ids[r]`.
    pub pairs: DevicePtr<u32>,
}

/// Rows `[rows, width]` of both halves of a feed-forward; `out` may be `gate`.
#[derive(Clone, Copy)]
pub struct Gate {
    pub gate: DevicePtr<f32>,
    pub up: DevicePtr<f32>,
    pub out: DevicePtr<f32>,
    pub rows: usize,
    pub width: usize,
    pub gating: Gating,
    pub biases: Option<GateBiases>,
}

impl Gating {
    /// As kernels number it, with alpha and limit.
    pub(super) fn arguments(self) -> (usize, f32, f32) {
        match self {
            Gating::Silu => (0, 0.0, 0.0),
            Gating::GeluTanh => (1, 0.0, 0.0),
            Gating::Clamped { alpha, limit } => (2, alpha, limit),
        }
    }
}

impl Gpu {
    /// `out = gating(gate, up)`.
    ///
    /// # Errors
    /// Whatever the driver says.
    ///
    /// # Panics
    /// When a buffer is too small or not aligned to 16 bytes.
    pub fn gate(&self, gate: &Gate) -> Result<(), CudaError> {
        let none = (DevicePtr::null(), DevicePtr::null(), DevicePtr::null(), DevicePtr::null());
        let (gate_bias, up_bias, ids, pairs) =
            gate.biases.map_or(none, |b| (b.gate, b.up, b.ids, b.pairs));
        let pointers = [gate.gate, gate.up, gate.out, gate_bias, up_bias];
        let aligned = |pointer: &DevicePtr<f32>| pointer.address().is_multiple_of(16);
        assert!(pointers.iter().all(aligned), "gates are read by 16 bytes");
        // Where rows do not matter they are one.
        let (rows, width) = match gate.biases {
            Some(_) => (gate.rows, gate.width),
            None => (1, gate.rows * gate.width),
        };
        let values = gate.rows * gate.width;
        let (kind, alpha, limit) = gate.gating.arguments();
        let grid = (blocks(width.div_ceil(4)), rows.min(GRID_Y_MAX) as u32, 1);
        Launch::new(self.kernel("elementwise", "gate")?, grid, (THREADS as u32, 1, 1))
            .ptr(gate.gate, values)
            .ptr(gate.up, values)
            .ptr(gate.out, values)
            .u64(width as u64)
            .int(rows)
            .int(kind)
            .float(alpha)
            .float(limit)
            .optional(gate_bias, gate.width)
            .optional(up_bias, gate.width)
            .optional(ids, gate.rows)
            .optional(pairs, gate.rows)
            .run(self)
    }
}
