//! Tests with a C program that loads everything in the fixtures, and with loads that must be refused.

mod support;

use std::path::{Path, PathBuf};
use std::process::Command;

use forebay_engine::pack::{Codec, PackError, PackOptions, pack};
use forebay_lab::synth::{SynthOptions, synthesize};
use forebay_store::OutputFile;
use support::{compile, compile_linked, here};
#[cfg(feature = "cuda")]
use support::{compile_driver, skip};

/// Runs the program, whose output must end with `ok`.
fn run(program: &Path, arguments: &[&Path]) {
    succeeds(Command::new(program).args(arguments), arguments);
}

fn succeeds(command: &mut Command, arguments: &[&Path]) {
    let output = command.output().expect("the program starts");
    let wrong = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{arguments:?}: {wrong}");
    assert_eq!(output.stdout, b"ok\n");
}

/// Packs a model into a folder, with the bytes of tensors as a load has them. Returns `None` for a model that cannot run.
fn packed(model: &Path, folder: &Path, number: usize) -> Option<PathBuf> {
    packed_as(Codec::Compact, model, folder, number)
}

fn packed_as(codec: Codec, model: &Path, folder: &Path, number: usize) -> Option<PathBuf> {
    let packed = folder.join(format!("{number}-{codec:?}.fbay"));
    let out = OutputFile::create(&packed).expect("a new file");
    let options = PackOptions { codec, ..PackOptions::default() };
    match pack(model, out, options, &mut |_, _| true) {
        Ok(_) => Some(packed),
        // A model that cannot run cannot be packed.
        Err(PackError::Model(_)) => None,
        Err(error) => panic!("{}: {error}", model.display()),
    }
}

/// Returns the GGUF files and safetensors folders of `FOREBAY_FIXTURES`, else of the project's own fixtures.
fn models() -> Vec<PathBuf> {
    let set = std::env::var_os("FOREBAY_FIXTURES").map(PathBuf::from);
    let set = set.unwrap_or_else(|| here().join("../../fixtures"));
    let entries = |folder: PathBuf| {
        let found = std::fs::read_dir(folder).into_iter().flatten();
        found.map(|entry| entry.expect("a readable folder").path())
    };
    let is_gguf = |path: &PathBuf| path.extension().is_some_and(|it| it == "gguf");
    let mut found: Vec<PathBuf> =
        entries(set.join("gguf")).flat_map(entries).filter(is_gguf).collect();
    found.extend(entries(set.join("models")).filter(|path| path.join("config.json").exists()));
    found.sort();
    assert!(found.len() >= 2, "the project's own fixtures hold models");
    found
}

#[test]
fn a_c_program_loads_what_pread_reads() {
    let folder = tempfile::tempdir().unwrap();
    let Some(program) = compile("loads", folder.path()) else { return };
    let models = models();
    let mut arguments = vec![Path::new("check"), Path::new("cpu")];
    arguments.extend(models.iter().map(PathBuf::as_path));
    run(&program, &arguments);
}

#[test]
fn the_example_loads_the_demo_model() {
    let folder = tempfile::tempdir().unwrap();
    let out = folder.path().join("load_weights");
    let Some(program) = compile_linked("examples/load_weights.c", out) else { return };
    let model = here().join("../../models/tales-moe-sticky-Q4_K_M.gguf");
    let output = Command::new(&program).arg(model).arg("cpu").output().unwrap();
    let said = String::from_utf8_lossy(&output.stdout);
    assert!(output.status.success(), "{said}{}", String::from_utf8_lossy(&output.stderr));
    assert!(said.contains(" tensors, ") && said.contains("the largest is "), "{said}");
    let output = Command::new(&program).args(["no-such-model", "cpu"]).output().unwrap();
    let wrong = String::from_utf8_lossy(&output.stderr);
    assert!(wrong.contains("FOREBAY_CANNOT_OPEN") && wrong.contains("no-such-model"), "{wrong}");
    assert_eq!(output.status.code(), Some(1));
}

#[test]
fn packs_lie_in_host_memory_as_in_the_file() {
    let folder = tempfile::tempdir().unwrap();
    let Some(program) = compile("loads", folder.path()) else { return };
    let mut checked = 0;
    for (number, model) in models().iter().enumerate() {
        let Some(packed) = packed(model, folder.path(), number) else { continue };
        run(&program, &[Path::new("check"), Path::new("cpu"), &packed]);
        checked += 1;
    }
    assert!(checked >= 2, "{checked} packs");
}

#[test]
fn compact_weights_of_packs_become_those_of_the_source() {
    let folder = tempfile::tempdir().unwrap();
    let Some(program) = compile("loads", folder.path()) else { return };
    for (number, shape) in ["qwen3moe-tiny", "deepseek-v3-tiny"].into_iter().enumerate() {
        let model = folder.path().join(format!("{number}.gguf"));
        let quantisation = Some("BF16".to_owned());
        let options = SynthOptions { quantisation, ..SynthOptions::default() };
        let out = OutputFile::create(&model).expect("a new file");
        synthesize(shape, out, &options, &mut |_, _| true).expect("a known shape");
        let packed = packed(&model, folder.path(), number).expect("a model that runs");
        run(&program, &[Path::new("same"), Path::new("cpu"), &model, &packed]);
        run(&program, &[Path::new("check"), Path::new("cpu"), &packed]);
        let coded = packed_as(Codec::Exponents, &model, folder.path(), number);
        let coded = coded.expect("a model that runs");
        run(&program, &[Path::new("same"), Path::new("cpu"), &model, &coded]);
    }
}

#[test]
fn what_a_c_program_cannot_have_is_refused_in_words() {
    let folder = tempfile::tempdir().unwrap();
    let Some(program) = compile("loads", folder.path()) else { return };
    let empty = tempfile::tempdir().unwrap();
    run(&program, &[Path::new("errors"), empty.path()]);
}

#[test]
#[cfg(feature = "cuda")]
fn loads_to_a_gpu_put_every_byte_in_its_place_and_give_everything_back() {
    let folder = tempfile::tempdir().unwrap();
    let Some(program) = compile("loads", folder.path()) else { return };
    let Some(_) = compile_driver(folder.path()) else { return };
    let mut models = models();
    for number in 0..models.len() {
        models.extend(packed(&models[number], folder.path(), number));
    }
    let mut arguments = vec![Path::new("check"), Path::new("cuda:0")];
    arguments.extend(models.iter().map(PathBuf::as_path));
    let mut command = Command::new(&program);
    command.env("LD_LIBRARY_PATH", folder.path()).env("GPU_IS_HOST_MEMORY", "1");
    succeeds(command.args(&arguments), &arguments);
}

#[test]
#[cfg(feature = "cuda")]
fn a_c_program_loads_to_a_gpu() {
    let device = forebay_cuda::Gpu::count();
    if !matches!(device, Ok(1..)) {
        return skip(&format!("loads to a GPU from C: {device:?}"));
    }
    let folder = tempfile::tempdir().unwrap();
    let Some(program) = compile("loads", folder.path()) else { return };
    let models = models();
    let mut arguments = vec![Path::new("check"), Path::new("cuda:0")];
    arguments.extend(models.iter().map(PathBuf::as_path));
    run(&program, &arguments);
}
