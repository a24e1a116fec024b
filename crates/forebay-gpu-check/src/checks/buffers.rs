//! Misuse that must be refused: GPU memory beyond its end or after it was freed, and other addresses in the tables that
//! kernels follow.

use std::panic::{AssertUnwindSafe, catch_unwind, set_hook, take_hook};
use std::sync::Arc;

use anyhow::Result;
use forebay_cuda::{CudaError, DevicePtr};

use crate::harness::{Check, Context, Outcome};

pub fn checks() -> Vec<Check> {
    vec![Check::new("buffers that are refused", refused)]
}

fn refused(context: &Context) -> Result<Outcome> {
    let gpu = &context.gpu;
    let (large, small) = (gpu.allocate(64)?, gpu.allocate(60)?);
    let freed: DevicePtr<f32> = gpu.allocate(64)?.ptr();
    let words = gpu.host_words(16)?;
    let recorded = {
        let gone = gpu.allocate(64)?;
        gpu.begin_capture()?;
        gpu.fill(gone.ptr(), 0, 64)?;
        gpu.end_capture()?
    };
    let slots = Arc::new(gpu.allocate(256)?);
    let table = context.table(&slots, 128, &[slots.ptr::<u8>().address(), 0])?;
    let address = slots.ptr::<u8>().address();
    let slots_end = address + 129;
    let softcap = |x: DevicePtr<f32>| gpu.softcap(x, 4, 4, 30.0);
    type Work<'a> = Box<dyn Fn() -> Result<(), CudaError> + 'a>;
    let cases: [(&str, bool, Work<'_>); 12] = [
        ("a whole buffer", true, Box::new(|| softcap(large.ptr()))),
        ("a buffer that is too small", false, Box::new(|| softcap(small.ptr()))),
        ("a part of a buffer", false, Box::new(|| softcap(large.ptr::<f32>().offset(1)))),
        ("an offset beyond the end", false, {
            Box::new(|| softcap(large.ptr::<f32>().offset(17)))
        }),
        ("a freed buffer", false, Box::new(|| softcap(freed))),
        ("filling too much", false, Box::new(|| gpu.fill(small.ptr(), 0, 61))),
        ("copying too much", false, Box::new(|| gpu.copy(large.ptr(), small.ptr(), 64))),
        ("uploading too much", false, Box::new(|| gpu.upload(&[0_u32; 16], small.ptr()))),
        ("too few words", false, Box::new(|| gpu.queue_upload(&words, 0..16, small.ptr()))),
        ("recorded work with a freed buffer", false, Box::new(|| gpu.queue_graph(&recorded))),
        ("addresses of slots", true, Box::new(|| table.upload(gpu, 0, &[0, address + 128]))),
        ("an address behind the slots", false, Box::new(|| table.upload(gpu, 0, &[slots_end]))),
    ];
    let hook = take_hook();
    set_hook(Box::new(|_| {}));
    let mut outcome = Outcome::same::<u8>(&[], &[]);
    for (what, works, work) in &cases {
        let did = catch_unwind(AssertUnwindSafe(work)).is_ok_and(|done| done.is_ok());
        outcome = outcome.worse(Outcome::same(&[did], &[*works]).at(what));
    }
    set_hook(hook);
    gpu.synchronize()?;
    Ok(outcome)
}
