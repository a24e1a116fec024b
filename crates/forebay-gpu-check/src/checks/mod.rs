//! The checks and measurements, one file for each family of kernels.

mod alone;
mod attention;
mod attention_fused;
mod attention_inputs;
mod attention_rows;
mod buffers;
mod coded_streams;
mod compact;
mod convert;
mod convolutions;
mod delta;
mod elementwise;
mod embedding;
mod entries;
mod exponents;
mod fetch;
mod gating;
mod halves;
mod indexer;
mod layer_embeddings;
mod load;
mod matmul;
mod matvec;
mod modules;
mod ngrams;
mod norm;
mod paged;
mod pools;
mod predicted_streams;
mod quantize;
mod router;
mod row_factors;
mod state_runs;
mod streams;
mod top_k;

use crate::bench::Bench;
use crate::harness::Check;

pub fn checks() -> Vec<Check> {
    let families = [
        exponents::checks(),
        coded_streams::checks(),
        quantize::checks(),
        matvec::checks(),
        matmul::checks(),
        alone::checks(),
        compact::checks(),
        norm::checks(),
        elementwise::checks(),
        gating::checks(),
        delta::checks(),
        embedding::checks(),
        layer_embeddings::checks(),
        ngrams::checks(),
        convolutions::checks(),
        streams::checks(),
        predicted_streams::checks(),
        router::checks(),
        row_factors::checks(),
        fetch::checks(),
        top_k::checks(),
        attention_inputs::checks(),
        attention::checks(),
        attention_fused::checks(),
        attention_rows::checks(),
        indexer::checks(),
        pools::checks(),
        entries::checks(),
        buffers::checks(),
        convert::checks(),
        load::checks(),
        modules::checks(),
    ];
    families.into_iter().flatten().collect()
}

pub fn benches() -> Vec<Bench> {
    let families = [
        exponents::benches(),
        coded_streams::benches(),
        quantize::benches(),
        matvec::benches(),
        matmul::benches(),
        norm::benches(),
        gating::benches(),
        router::benches(),
        fetch::benches(),
        top_k::benches(),
        attention_inputs::benches(),
        attention::benches(),
        compact::benches(),
        convert::benches(),
        load::benches(),
    ];
    families.into_iter().flatten().collect()
}

#[cfg(test)]
mod tests {
    use std::io::Write;

    use crate::harness::{self, Context};

    #[test]
    fn kernels_agree_with_the_cpu() {
        match Context::open(0) {
            Ok(context) => {
                let (passed, report) = harness::run(&context, &super::checks());
                assert!(passed, "{report:#}");
            }
            Err(error) => {
                // Writes to stderr directly, because the test harness would capture `eprintln!`.
                let _ = writeln!(std::io::stderr(), "SKIPPED: no kernel was checked: {error}");
            }
        }
    }

    #[test]
    fn models_agree_with_their_references() {
        let workspace = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("../..");
        let candidates = [
            std::env::var_os("FOREBAY_FIXTURES").map(std::path::PathBuf::from),
            Some(workspace.join("../shared/fixtures")),
            Some(workspace.join("fixtures")),
        ];
        let fixtures = candidates.into_iter().flatten().find(|path| path.is_dir()).unwrap();
        let checks = crate::models::checks(&fixtures, 0).unwrap();
        match Context::open(0) {
            Ok(context) => {
                let (passed, report) = harness::run(&context, &checks);
                assert!(passed, "{report:#}");
            }
            Err(error) => {
                let _ = writeln!(std::io::stderr(), "SKIPPED: no model was checked: {error}");
            }
        }
    }

    #[test]
    fn names_are_unique() {
        let mut names: Vec<String> = super::checks().into_iter().map(|check| check.name).collect();
        let count = names.len();
        names.sort();
        names.dedup();
        assert_eq!(names.len(), count);
    }
}
