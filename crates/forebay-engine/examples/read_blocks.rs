//! Reads every tensor of a model with many reads in flight and without a memory map. For programs that compute with the
//! weights themselves.
//!
//! ```sh
//! cargo run --release -p forebay-engine --example read_blocks -- models/tales-moe-sticky-Q4_K_M.gguf
//! ```

use std::error::Error;
use std::path::Path;
use std::time::Instant;

use forebay_format::Catalog;
use forebay_store::{BlockReader, Priority, ReadRequest, ReaderOptions};

/// Number of reads in flight.
const IN_FLIGHT: usize = 16;

fn main() -> Result<(), Box<dyn Error>> {
    let path = std::env::args().nth(1).ok_or("usage: read_blocks MODEL")?;

    // The catalog says where each tensor is. Opening it reads the headers of the files, but no weights.
    let catalog = Catalog::open(Path::new(&path))?;
    let mut reader = BlockReader::open(&catalog.files, &ReaderOptions::default())?;

    let started = Instant::now();
    let mut bytes = 0_u64;
    let mut waiting = catalog.tensors().iter().enumerate();
    loop {
        // Keep the disk busy. A read owns its buffer until the answer returns it, so no buffer can be freed too early.
        while reader.in_flight() < IN_FLIGHT {
            let Some((number, tensor)) = waiting.next() else { break };
            let length = usize::try_from(tensor.extent.length)?;
            let request = ReadRequest {
                tag: number as u64,
                file: tensor.extent.file,
                offset: tensor.extent.offset,
                length,
                priority: Priority::Load,
            };
            let buffer = reader.buffer(length)?;
            reader.submit(request, buffer)?;
        }
        // Answers come in any order. The tag says which read this was.
        let Some(answer) = reader.wait()? else { break };
        let tensor = &catalog.tensors()[answer.tag as usize];
        let buffer = answer.result?;
        let block = &buffer.as_slice()[..tensor.extent.length as usize];
        bytes += block.len() as u64;
        if answer.tag < 3 {
            let sum: u64 = block.iter().map(|byte| u64::from(*byte)).sum();
            println!("{} {} {:?}: sum of bytes {sum}", tensor.name, tensor.ty, tensor.shape);
        }
    }
    let rate = bytes as f64 / started.elapsed().as_secs_f64() / 1e9;
    println!("{} tensors, {bytes} bytes, {rate:.2} GB/s", catalog.tensors().len());
    Ok(())
}
