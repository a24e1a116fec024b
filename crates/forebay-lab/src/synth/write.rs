//! Makes weights on several threads while one thread writes them, in order, at the speed of the disk.

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::mpsc::{Receiver, Sender, channel};
use std::sync::{Mutex, PoisonError};

use forebay_format::gguf::writer::GgufData;
use forebay_format::random_weights::{PIECE_BLOCKS, tensor_seed};
use forebay_store::OutputStream;

use super::error::{Progress, SynthError};
use super::plan::PlannedTensor;

/// Bytes that are made and written at a time.
const PIECE_BYTES: usize = 4 << 20;

/// Number of buffers per thread: one to fill, the others for pieces that wait to be written.
const BUFFERS_PER_THREAD: usize = 3;

/// A part of a tensor.
struct Piece {
    tensor: usize,
    first_block: u64,
    bytes: usize,
}

/// Writes the data of all tensors. The content of the file does not depend on `threads`.
///
/// # Errors
/// Returns [`SynthError::Format`] if the file cannot be written, and [`SynthError::Interrupted`] if `progress` returns
/// false.
pub fn write_all(
    tensors: &[PlannedTensor],
    data: &mut GgufData<OutputStream>,
    seed: u64,
    threads: usize,
    progress: &mut Progress<'_>,
) -> Result<(), SynthError> {
    let pieces = cut(tensors);
    let total_bytes = pieces.iter().map(|piece| piece.bytes as u64).sum();
    let seeds: Vec<u64> = tensors.iter().map(|tensor| tensor_seed(seed, &tensor.name)).collect();
    let next = AtomicUsize::new(0);
    let stop = AtomicBool::new(false);
    let (give_back, free) = channel();
    for _ in 0..threads.max(1) * BUFFERS_PER_THREAD {
        // Cannot fail: the receiver lives until the end of this function.
        let _ = give_back.send(Vec::new());
    }
    let free = Mutex::new(free);

    std::thread::scope(|scope| {
        let (done, made) = channel();
        for _ in 0..threads.max(1) {
            let done = done.clone();
            let (pieces, seeds, next, stop, free) = (&pieces, &seeds, &next, &stop, &free);
            scope.spawn(move || make(pieces, tensors, seeds, next, stop, free, &done));
        }
        drop(done);
        let result = write_in_order(&pieces, &made, &give_back, data, total_bytes, progress);
        stop.store(true, Ordering::Relaxed);
        // Wakes the threads that wait for a buffer.
        drop(give_back);
        result
    })
}

fn cut(tensors: &[PlannedTensor]) -> Vec<Piece> {
    let mut pieces = Vec::new();
    for (index, tensor) in tensors.iter().enumerate() {
        let block_bytes = tensor.ty.block_bytes();
        let blocks = tensor.shape.iter().product::<u64>() / tensor.ty.block_elements() as u64;
        let step = (PIECE_BYTES / (block_bytes * PIECE_BLOCKS) * PIECE_BLOCKS) as u64;
        let mut first_block = 0;
        while first_block < blocks {
            let count = step.min(blocks - first_block);
            let bytes = count as usize * block_bytes;
            pieces.push(Piece { tensor: index, first_block, bytes });
            first_block += count;
        }
    }
    pieces
}

/// Makes pieces until none is left. A thread takes a buffer before a piece, so the piece that must be written next
/// always has one.
fn make(
    pieces: &[Piece],
    tensors: &[PlannedTensor],
    seeds: &[u64],
    next: &AtomicUsize,
    stop: &AtomicBool,
    free: &Mutex<Receiver<Vec<u8>>>,
    done: &Sender<(usize, Vec<u8>)>,
) {
    while !stop.load(Ordering::Relaxed) {
        let (index, mut buffer) = {
            let free = free.lock().unwrap_or_else(PoisonError::into_inner);
            let Ok(buffer) = free.recv() else { return };
            (next.fetch_add(1, Ordering::Relaxed), buffer)
        };
        let Some(piece) = pieces.get(index) else { return };
        buffer.resize(piece.bytes, 0);
        tensors[piece.tensor].content.fill(seeds[piece.tensor], piece.first_block, &mut buffer);
        if done.send((index, buffer)).is_err() {
            return;
        }
    }
}

fn write_in_order(
    pieces: &[Piece],
    made: &Receiver<(usize, Vec<u8>)>,
    give_back: &Sender<Vec<u8>>,
    data: &mut GgufData<OutputStream>,
    total_bytes: u64,
    progress: &mut Progress<'_>,
) -> Result<(), SynthError> {
    let mut early = BTreeMap::new();
    let mut bytes_done = 0;
    for index in 0..pieces.len() {
        let buffer = loop {
            if let Some(buffer) = early.remove(&index) {
                break buffer;
            }
            let (made, buffer) = made.recv().map_err(|_| SynthError::Interrupted)?;
            early.insert(made, buffer);
        };
        data.write(&buffer)?;
        bytes_done += buffer.len() as u64;
        // If all making threads have ended, the buffer is freed.
        let _ = give_back.send(buffer);
        if !progress(bytes_done, total_bytes) {
            return Err(SynthError::Interrupted);
        }
    }
    Ok(())
}
