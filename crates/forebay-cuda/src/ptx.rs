//! Every module with its PTX. Written by `cargo xtask ptx` from `kernels/modules.txt`.

/// Names and PTX texts.
#[rustfmt::skip]
pub(crate) static MODULES: [(&str, &str); 2] = [
    ("quantize", include_str!("../kernels/ptx/quantize.compute_80.ptx")),
    ("bandwidth", include_str!("../kernels/ptx/bandwidth.compute_80.ptx")),
];
