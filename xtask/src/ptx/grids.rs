//! The codebooks of the IQ types for kernels, made from those of forebay-format.

use std::path::Path;

use anyhow::{Context, Result};

/// The file that kernels include. It is in the repository because the emulated driver reads it, too.
pub const NAME: &str = "grids.cuh";

/// The tables, counted from the folder of kernels.
const TABLES: &str = "../../forebay-format/src/quant/grids.rs";

/// Returns the text of the file.
pub fn text(kernels: &Path) -> Result<String> {
    let path = kernels.join(TABLES);
    let tables = std::fs::read_to_string(&path).with_context(|| path.display().to_string())?;
    of_tables(&tables).with_context(|| path.display().to_string())
}

/// Makes each table of Rust an array for kernels.
fn of_tables(tables: &str) -> Result<String> {
    let first = tables.find("/// Grid of").context("there are no grids")?;
    let mut text = "// Codebooks of the IQ types, as packed codes: element j of a point is code j, counted from the low bits. They are\n\
         // constants of the formats, the same as in forebay-format's `quant`.\n#pragma once\n\n// clang-format off\n"
        .to_owned();
    for line in tables[first..].lines() {
        if let Some(comment) = line.strip_prefix("///") {
            text += &format!("//{comment}");
        } else if let Some(array) = line.strip_prefix("pub(super) static ") {
            let (name, rest) = array.split_once(": [u16; ").context("a grid has 16-bit codes")?;
            let (length, _) = rest.split_once(']').context("a grid has a length")?;
            text += &format!("static __device__ const u16 GRID_{name}[{length}] = {{");
        } else if line == "];" {
            text += "};";
        } else {
            text += line;
        }
        text += "\n";
    }
    Ok(text + "\n// clang-format on\n")
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Tables that were edited without a run of `cargo xtask ptx` must fail.
    #[test]
    fn the_file_is_fresh() {
        let kernels = crate::repository_root().join(super::super::KERNELS);
        let found = std::fs::read_to_string(kernels.join(NAME)).unwrap();
        assert!(found == text(&kernels).unwrap(), "run `cargo xtask ptx`");
    }

    #[test]
    fn tables_become_arrays() {
        let tables = "//! Why\n\nconst LEVELS: [f32; 1] = [1.0];\n\n/// Grid of X: 2-bit codes.\npub(super) static X: [u16; 3] = [\n    0x0001, 0x0002,\n    0x0003,\n];\n";
        let text = of_tables(tables).unwrap();
        assert!(text.contains(
            "off\n// Grid of X: 2-bit codes.\nstatic __device__ const u16 GRID_X[3] = {\n    0x0001, 0x0002,\n    0x0003,\n};\n"
        ));
        assert!(!text.contains("LEVELS"));
        assert!(of_tables("pub(super) static X: [u16; 1] = [1];").is_err());
    }
}
