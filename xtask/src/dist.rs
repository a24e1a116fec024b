//! `cargo xtask dist` makes the files of a release for this machine: an archive, a Debian package, the installer, checksums,
//! and on request the Python wheel and the container image.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context as _, Result, bail, ensure};
use sha2::{Digest as _, Sha256};

const VERSION: &str = env!("CARGO_PKG_VERSION");
const DEMO: &str = "models/tales-moe-sticky-Q4_K_M.gguf";
const USAGE: &str = "\
usage: cargo xtask dist [--out DIR] [--profile NAME] [--built] [--place URL] [--wheel] [--image]
  --out DIR       folder for the files (default: target/release-files); it must be new or empty
  --profile NAME  profile of Cargo (default: dist)
  --built         take the programs that this profile has built already
  --place URL     where the files will be published; install.sh fetches them from there
  --wheel         make the Python wheel, too; needs maturin
  --image         build the container image forebay:VERSION, too; needs docker";

struct Options {
    out: PathBuf,
    profile: String,
    built: bool,
    place: Option<String>,
    wheel: bool,
    image: bool,
}

/// Makes the files and prints their names.
///
/// # Errors
/// Returns an error if a tool fails or is missing.
pub fn run(root: &Path, arguments: &[String]) -> Result<bool> {
    let Some(options) = parse(root, arguments)? else { return Ok(true) };
    if options.out.exists() {
        let left = fs::read_dir(&options.out)?.next().is_some();
        ensure!(!left, "{}: is not empty: name another --out", options.out.display());
    }
    fs::create_dir_all(&options.out)?;
    if !options.built {
        build(root, &options.profile)?;
    }
    let programs = programs(root, &options.profile);
    let work = options.out.join(".work");
    let name = format!("forebay-{VERSION}-linux-{}", std::env::consts::ARCH);
    let tree = work.join(&name);
    lay_out(root, &programs, &tree)?;
    archive(&work, &name, &options.out)?;
    debian_package(&work, &tree, &options.out)?;
    if options.wheel {
        wheel(root, &options)?;
    }
    if options.image {
        let tag = format!("forebay:{VERSION}");
        succeed(Command::new("docker").args(["build", "--tag", &tag, "."]).current_dir(root))?;
    }
    installer(root, options.place.as_deref(), &options.out)?;
    fs::remove_dir_all(&work)?;
    checksums(&options.out)?;
    for entry in sorted(&options.out)? {
        println!("{:>12}  {}", fs::metadata(&entry)?.len(), entry.display());
    }
    Ok(true)
}

fn parse(root: &Path, arguments: &[String]) -> Result<Option<Options>> {
    let mut options = Options {
        out: root.join("target/release-files"),
        profile: "dist".to_owned(),
        built: false,
        place: None,
        wheel: false,
        image: false,
    };
    let mut rest = arguments.iter();
    while let Some(argument) = rest.next() {
        let mut value =
            || rest.next().with_context(|| format!("{argument} needs a value\n{USAGE}"));
        match argument.as_str() {
            "--out" => options.out = std::path::absolute(value()?)?,
            "--profile" => options.profile = value()?.clone(),
            "--place" => options.place = Some(value()?.clone()),
            "--built" => options.built = true,
            "--wheel" => options.wheel = true,
            "--image" => options.image = true,
            "--help" | "-h" => {
                println!("{USAGE}");
                return Ok(None);
            }
            _ => bail!("{argument}: there is no such option\n{USAGE}"),
        }
    }
    Ok(Some(options))
}

/// Builds the program and the C library.
fn build(root: &Path, profile: &str) -> Result<()> {
    let mut cargo = Command::new("cargo");
    cargo.args(["build", "--locked", "--profile", profile, "-p", "forebay", "-p", "forebay-c"]);
    succeed(without_cargo(&mut cargo).current_dir(root))
}

/// Returns the folder of the programs that a profile builds.
fn programs(root: &Path, profile: &str) -> PathBuf {
    let target = std::env::var_os("CARGO_TARGET_DIR").map(PathBuf::from);
    target.unwrap_or_else(|| root.join("target")).join(if profile == "dev" {
        "debug"
    } else {
        profile
    })
}

/// Cargo sets variables of its own package for this program. Build scripts of others would run again because of them.
fn without_cargo(command: &mut Command) -> &mut Command {
    for (name, _) in std::env::vars_os() {
        let name = name.to_string_lossy().into_owned();
        if name.starts_with("CARGO_PKG_") || name.starts_with("CARGO_MANIFEST_") {
            command.env_remove(name);
        }
    }
    command
}

/// Lays out the files as they are installed below a prefix such as `/usr/local`.
fn lay_out(root: &Path, programs: &Path, tree: &Path) -> Result<()> {
    let copy = |from: &Path, to: &str| -> Result<()> {
        let to = tree.join(to);
        fs::create_dir_all(to.parent().expect("a file lies in a folder"))?;
        fs::copy(from, &to).with_context(|| from.display().to_string())?;
        Ok(())
    };
    let program = programs.join("forebay");
    copy(&program, "bin/forebay")?;
    copy(&root.join(DEMO), &format!("share/forebay/{DEMO}"))?;
    for library in ["libforebay.so", "libforebay.a"] {
        copy(&programs.join(library), &format!("lib/{library}"))?;
    }
    for header in sorted(&root.join("crates/forebay-c/include"))? {
        let name = header.file_name().expect("listed").to_string_lossy().into_owned();
        copy(&header, &format!("include/{name}"))?;
    }
    for page in
        ["README.md", "CHANGELOG.md", "LICENSE-MIT", "LICENSE-APACHE", "packaging/forebay.service"]
    {
        let name = page.rsplit('/').next().expect("a name");
        copy(&root.join(page), &format!("share/doc/forebay/{name}"))?;
    }
    for (shell, to) in [
        ("bash", "share/bash-completion/completions/forebay"),
        ("zsh", "share/zsh/site-functions/_forebay"),
        ("fish", "share/fish/vendor_completions.d/forebay.fish"),
    ] {
        let printed = Command::new(&program).args(["completions", shell]).output()?;
        ensure!(printed.status.success(), "{} completions {shell} failed", program.display());
        let to = tree.join(to);
        fs::create_dir_all(to.parent().expect("a file lies in a folder"))?;
        fs::write(to, printed.stdout)?;
    }
    Ok(())
}

/// Packs the tree. The same files give the same archive.
fn archive(work: &Path, name: &str, out: &Path) -> Result<()> {
    let to = out.join(format!("{name}.tar.gz"));
    let mut tar = Command::new("tar");
    tar.args(["--sort=name", "--owner=0", "--group=0", "--numeric-owner", "--mtime=@0"]);
    tar.args(["--use-compress-program", "gzip -n9", "-cf"]).arg(to).arg("-C").arg(work).arg(name);
    succeed(&mut tar)
}

/// Makes a Debian package. Says so where `dpkg-deb` is missing.
fn debian_package(work: &Path, tree: &Path, out: &Path) -> Result<()> {
    if Command::new("dpkg-deb").arg("--version").output().is_err() {
        eprintln!("NO DEBIAN PACKAGE: dpkg-deb is not installed");
        return Ok(());
    }
    let architecture = match std::env::consts::ARCH {
        "x86_64" => "amd64",
        "aarch64" => "arm64",
        other => bail!("Debian's name of {other} is not known here"),
    };
    let package = work.join("debian");
    fs::create_dir_all(package.join("DEBIAN"))?;
    succeed(Command::new("cp").arg("-r").arg(tree).arg(package.join("usr")))?;
    // Debian keeps units and libraries in folders of their own.
    let service = package.join("usr/share/doc/forebay/forebay.service");
    let units = package.join("usr/lib/systemd/system");
    fs::create_dir_all(&units)?;
    let unit = fs::read_to_string(&service)?.replace("/usr/local/bin/", "/usr/bin/");
    fs::write(units.join("forebay.service"), unit)?;
    fs::remove_file(service)?;
    let size = kibibytes(&package)?;
    let library = c_library(&package.join("usr/bin/forebay"))?;
    let control = format!(
        "Package: forebay\nVersion: {VERSION}\nArchitecture: {architecture}\nSection: science\nPriority: optional\n\
         Maintainer: The forebay developers <forebay@invalid>\nInstalled-Size: {size}\n\
         Depends: libc6 (>= {library}), libgcc-s1\nRecommends: ca-certificates\n\
         Description: language models larger than VRAM or RAM, streamed from the SSD\n \
         forebay streams the weights of a language model through a bounded cache and computes\n on the CPU or on an NVIDIA GPU.\n"
    );
    fs::write(package.join("DEBIAN/control"), control)?;
    let to = out.join(format!("forebay_{VERSION}_{architecture}.deb"));
    succeed(
        Command::new("dpkg-deb")
            .args(["--root-owner-group", "-Zzstd", "--build"])
            .arg(&package)
            .arg(to),
    )
}

/// Returns the oldest version of the C library that a program runs with: the newest that one of its symbols names.
fn c_library(program: &Path) -> Result<String> {
    const NAME: &[u8] = b"GLIBC_2.";
    let bytes = fs::read(program)?;
    let minor = |at: &[u8]| -> Option<u32> {
        let digits: String = at
            .strip_prefix(NAME)?
            .iter()
            .map(|byte| char::from(*byte))
            .take_while(char::is_ascii_digit)
            .collect();
        digits.parse().ok()
    };
    let newest = bytes.windows(NAME.len() + 3).filter_map(minor).max();
    let newest = newest.with_context(|| format!("{}: names no C library", program.display()))?;
    Ok(format!("2.{newest}"))
}

/// Returns the size of a folder's files, rounded up.
fn kibibytes(folder: &Path) -> Result<u64> {
    let mut sum = 0;
    for entry in sorted(folder)? {
        sum += match entry.is_dir() {
            true => kibibytes(&entry)?,
            false => fs::metadata(&entry)?.len().div_ceil(1024),
        };
    }
    Ok(sum)
}

fn wheel(root: &Path, options: &Options) -> Result<()> {
    let mut maturin = Command::new("maturin");
    maturin.args(["build", "--locked", "--profile", &options.profile, "--out"]).arg(&options.out);
    succeed(without_cargo(&mut maturin).current_dir(root.join("python")))
        .context("--wheel needs maturin: python3 -m pip install maturin")
}

/// Writes the installer for this version.
fn installer(root: &Path, place: Option<&str>, out: &Path) -> Result<()> {
    let mut script = fs::read_to_string(root.join("packaging/install.sh"))?;
    ensure!(
        script.contains("'@VERSION@'") && script.contains("'@PLACE@'"),
        "install.sh has no gaps to fill"
    );
    script = script.replace("'@VERSION@'", &format!("'{VERSION}'"));
    if let Some(place) = place {
        let is_plain = |c: char| c.is_ascii_alphanumeric() || "-._~:/@%+".contains(c);
        ensure!(
            place.chars().all(is_plain),
            "--place {place}: has characters that a shell may misread"
        );
        script = script.replace("'@PLACE@'", &format!("'{place}'"));
    }
    fs::write(out.join("install.sh"), script)?;
    Ok(())
}

fn checksums(out: &Path) -> Result<()> {
    let mut lines = String::new();
    for entry in sorted(out)? {
        let name = entry.file_name().expect("listed").to_string_lossy().into_owned();
        let sum = Sha256::digest(fs::read(&entry)?);
        let sum: String = sum.iter().map(|byte| format!("{byte:02x}")).collect();
        lines += &format!("{sum}  {name}\n");
    }
    fs::write(out.join("SHA256SUMS"), lines)?;
    Ok(())
}

fn sorted(folder: &Path) -> Result<Vec<PathBuf>> {
    let entries = fs::read_dir(folder).with_context(|| folder.display().to_string())?;
    let mut paths = entries.map(|entry| Ok(entry?.path())).collect::<Result<Vec<_>>>()?;
    paths.sort();
    Ok(paths)
}

fn succeed(command: &mut Command) -> Result<()> {
    let program = command.get_program().to_string_lossy().into_owned();
    let status = command.status().with_context(|| program.clone())?;
    ensure!(status.success(), "{program} failed: {status}");
    Ok(())
}
