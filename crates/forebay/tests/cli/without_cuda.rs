//! Tests a build without the cargo feature `cuda`: GPUs are refused with a clear message, and everything else works.

use crate::harness::forebay;

const WHY: &str = "this build has no CUDA support";

#[test]
fn a_gpu_is_refused_by_every_command_that_takes_one() {
    let model = crate::harness::workspace().join("models/tales-moe-sticky-Q4_K_M.gguf");
    let model = model.to_str().unwrap();
    for arguments in [
        vec!["run", model, "--prompt", "x", "--device", "cuda"],
        vec!["bench", model, "--device", "cuda:1"],
        vec!["load", model, "--device", "cuda"],
    ] {
        let said = forebay(&arguments).failed(1);
        assert!(said.contains(WHY) && said.contains("--device cpu"), "{arguments:?}: {said}");
    }
}

#[test]
fn a_budget_for_vram_is_refused() {
    let said = forebay(&["run", "--prompt", "x", "--vram", "1GiB"]).failed(2);
    assert!(said.contains(WHY), "{said}");
}

#[test]
fn the_cpu_computes_and_the_statistics_say_why() {
    let arguments = ["run", "--prompt", "Once", "--max-tokens", "4", "--json", "--ram", "32MiB"];
    let document = forebay(&arguments).json();
    let text = document.to_string();
    assert!(text.contains(WHY), "{text}");
}

#[test]
fn doctor_says_why_it_measures_no_gpu() {
    let folder = tempfile::tempdir().unwrap();
    let folder = folder.path().to_str().unwrap();
    let document = forebay(&["doctor", folder, "--no-save", "--json"]).json();
    assert_eq!(document["gpu"]["count"], 0);
    assert_eq!(document["gpu"]["why"], WHY);
}
