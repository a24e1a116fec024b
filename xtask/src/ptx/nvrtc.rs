//! NVIDIA's run-time compiler, loaded from the folder that the environment names.

use std::ffi::{CStr, CString, c_char, c_int};
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, bail};
use libloading::Library;

type Program = *mut std::ffi::c_void;
type Create = unsafe extern "C" fn(
    *mut Program,
    *const c_char,
    *const c_char,
    c_int,
    *const *const c_char,
    *const *const c_char,
) -> c_int;
type Compile = unsafe extern "C" fn(Program, c_int, *const *const c_char) -> c_int;
type GetSize = unsafe extern "C" fn(Program, *mut usize) -> c_int;
type GetText = unsafe extern "C" fn(Program, *mut c_char) -> c_int;
type Destroy = unsafe extern "C" fn(*mut Program) -> c_int;
type Version = unsafe extern "C" fn(*mut c_int, *mut c_int) -> c_int;
type ErrorText = unsafe extern "C" fn(c_int) -> *const c_char;

const HOW_TO_GET: &str = "`pip install nvidia-cuda-nvrtc-cu12==12.4.127 nvidia-cuda-runtime-cu12==12.4.127` (needs no \
    GPU), then set FOREBAY_NVRTC to the folder of libnvrtc.so.12 (nvidia/cuda_nvrtc/lib) and FOREBAY_CUDA_INCLUDE to \
    that of cuda_fp16.h (nvidia/cuda_runtime/include)";

/// The loaded compiler.
pub struct Nvrtc {
    compiler: Library,
    include: PathBuf,
    /// Version, such as `12.4`.
    pub version: String,
}

impl Nvrtc {
    pub fn load() -> Result<Nvrtc> {
        let folder = |name| {
            std::env::var_os(name)
                .map(PathBuf::from)
                .with_context(|| format!("{name} is not set; {HOW_TO_GET}"))
        };
        let (folder, include) = (folder("FOREBAY_NVRTC")?, folder("FOREBAY_CUDA_INCLUDE")?);
        if !include.join("cuda_fp16.h").is_file() {
            bail!("{} has no cuda_fp16.h; {HOW_TO_GET}", include.display());
        }
        let path = folder.join("libnvrtc.so.12");
        // SAFETY: loading runs the initialisers of NVIDIA's library, which require nothing of the program.
        let library = unsafe { Library::new(&path) }
            .with_context(|| format!("cannot load {}; {HOW_TO_GET}", path.display()))?;
        let (mut major, mut minor) = (0, 0);
        // SAFETY: the signature is that of nvrtc.h, and the pointers are those of live integers.
        unsafe { library.get::<Version>(b"nvrtcVersion\0")?(&mut major, &mut minor) };
        Ok(Nvrtc { compiler: library, include, version: format!("{major}.{minor}") })
    }

    /// Compiles one source file and returns its PTX.
    pub fn compile(&self, source: &Path, options: &[String], kernels: &Path) -> Result<String> {
        let text = CString::new(std::fs::read(source)?)?;
        // The bare name is used, so that messages and PTX do not contain the path of the repository.
        let name = source.file_name().context("a source has a name")?.to_string_lossy();
        let name = CString::new(name.into_owned())?;
        let mut options: Vec<CString> =
            options.iter().map(|option| CString::new(option.as_str())).collect::<Result<_, _>>()?;
        for folder in [kernels, &self.include] {
            options.push(CString::new(format!("--include-path={}", folder.display()))?);
        }
        let options: Vec<*const c_char> = options.iter().map(|option| option.as_ptr()).collect();
        let mut program: Program = std::ptr::null_mut();
        let null = std::ptr::null();
        // SAFETY: the signatures are those of nvrtc.h. All strings end in NUL and outlive the calls. The program is
        // destroyed once.
        unsafe {
            let create = self.compiler.get::<Create>(b"nvrtcCreateProgram\0")?;
            let made = create(&mut program, text.as_ptr(), name.as_ptr(), 0, null, null);
            self.check(made)?;
            let compile = self.compiler.get::<Compile>(b"nvrtcCompileProgram\0")?;
            let compiled = compile(program, options.len() as c_int, options.as_ptr());
            let log = self.text(program, b"nvrtcGetProgramLogSize\0", b"nvrtcGetProgramLog\0")?;
            if !log.trim().is_empty() {
                eprintln!("{}", log.trim());
            }
            let ptx = self
                .check(compiled)
                .and_then(|()| self.text(program, b"nvrtcGetPTXSize\0", b"nvrtcGetPTX\0"));
            self.compiler.get::<Destroy>(b"nvrtcDestroyProgram\0")?(&mut program);
            ptx
        }
    }

    /// Returns one of the texts of a program.
    ///
    /// # Safety
    /// `program` is alive, and the two functions are NVRTC's for the size of one text and for the text.
    unsafe fn text(&self, program: Program, size: &[u8], get: &[u8]) -> Result<String> {
        let mut bytes = 0;
        // SAFETY: by the caller's promise. The buffer is as long as the library requested.
        unsafe {
            self.check(self.compiler.get::<GetSize>(size)?(program, &mut bytes))?;
            let mut text = vec![0_u8; bytes.max(1)];
            self.check(self.compiler.get::<GetText>(get)?(program, text.as_mut_ptr().cast()))?;
            Ok(CStr::from_bytes_until_nul(&text)?.to_string_lossy().into_owned())
        }
    }

    fn check(&self, status: c_int) -> Result<()> {
        if status == 0 {
            return Ok(());
        }
        // SAFETY: the signature is that of nvrtc.h, and the text is a constant of the library.
        let text = unsafe {
            CStr::from_ptr(self.compiler.get::<ErrorText>(b"nvrtcGetErrorString\0")?(status))
        };
        bail!("NVRTC: {}", text.to_string_lossy())
    }
}
