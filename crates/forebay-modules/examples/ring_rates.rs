//! Rates at which weights of ordinary RAM reach a GPU through rings of pinned memory: of several sizes, with stores that stay in the caches and with
//! others, and with several numbers of copying threads. A ring that the processor's cache holds is read from there by the GPU, so that memory
//! carries each byte once instead of three times.
//!
//! `cargo run --release -p forebay-modules --example ring_rates -- [GiB of weights] [threads ...]`

use std::collections::VecDeque;
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

use forebay_compute::Pool;
use forebay_cuda::{CopyStream, DeviceMemory, Gpu, InFlight};
use forebay_store::{Arena, SlotBuffer, copy_past_cache};

/// Bytes that one thread copies at a time.
const PIECE_BYTES: usize = 256 << 10;
/// Bytes of a slot, and of the whole ring.
const RINGS: [(usize, usize); 7] = [
    (1 << 20, 8 << 20),
    (2 << 20, 16 << 20),
    (4 << 20, 32 << 20),
    (4 << 20, 64 << 20),
    (8 << 20, 64 << 20),
    (32 << 20, 256 << 20),
    (32 << 20, 1 << 30),
];

type Failure = Box<dyn std::error::Error>;

enum Slot {
    Free(SlotBuffer),
    UnderWay(InFlight<SlotBuffer>),
}

/// Copies all weights through the slots, and returns the seconds.
fn pass(
    (pool, copies, stage): (&Pool, &CopyStream, &DeviceMemory),
    weights: &[u8],
    slots: &mut VecDeque<Slot>,
    copy: fn(&mut [u8], &[u8]),
) -> Result<f64, Failure> {
    let began = Instant::now();
    let mut rest = weights;
    while !rest.is_empty() {
        let mut buffer = match slots.pop_front().expect("a ring has slots") {
            Slot::Free(buffer) => buffer,
            Slot::UnderWay(flight) => flight.finish()?,
        };
        let (part, behind) = rest.split_at(rest.len().min(buffer.as_mut_slice().len()));
        rest = behind;
        let to = buffer.as_mut_slice()[..part.len()].chunks_mut(PIECE_BYTES);
        let pieces = Mutex::new(to.zip(part.chunks(PIECE_BYTES)));
        let next = || pieces.lock().unwrap_or_else(PoisonError::into_inner).next();
        pool.run(&|_| {
            while let Some((to, from)) = next() {
                copy(to, from);
            }
        });
        let copies_of = [(0..part.len(), stage.ptr::<u8>())];
        slots.push_back(Slot::UnderWay(copies.upload(buffer, copies_of)?));
    }
    for _ in 0..slots.len() {
        if let Some(slot) = slots.pop_front() {
            slots.push_back(match slot {
                Slot::UnderWay(flight) => Slot::Free(flight.finish()?),
                free => free,
            });
        }
    }
    Ok(began.elapsed().as_secs_f64())
}

fn main() -> Result<(), Failure> {
    let mut numbers = std::env::args().skip(1).map(|word| word.parse::<usize>());
    let gibibytes = numbers.next().transpose()?.unwrap_or(4);
    let mut threads = numbers.collect::<Result<Vec<_>, _>>()?;
    if threads.is_empty() {
        let cores = std::thread::available_parallelism()?.get();
        threads =
            vec![cores / 4, cores / 2, 3 * cores / 4].into_iter().map(|it| it.max(1)).collect();
    }
    let mut random = fastrand::Rng::with_seed(1);
    let mut weights = vec![0; gibibytes << 30];
    weights.chunks_mut(4096).for_each(|page| page[0] = random.u8(..));
    let gpu = Gpu::open(0)?;
    let copies = gpu.copy_stream()?;
    println!("| slot, MiB | ring, MiB | threads | past the cache, GB/s | through it, GB/s |");
    println!("| --- | --- | --- | --- | --- |");
    for (slot_bytes, ring_bytes) in RINGS {
        let stage = gpu.allocate(slot_bytes)?;
        let arena = Arena::map(ring_bytes)?;
        arena.make_resident()?;
        let _pinned = gpu.pin(arena.addresses(), arena.clone())?;
        let slot = |_| Ok::<_, Failure>(Slot::Free(arena.carve(slot_bytes)?));
        let mut slots =
            (0..ring_bytes / slot_bytes).map(slot).collect::<Result<VecDeque<_>, _>>()?;
        for threads in &threads {
            let pool = Pool::new(*threads);
            pool.set_spin(Duration::from_micros(100));
            let mut rate = |copy: fn(&mut [u8], &[u8])| -> Result<f64, Failure> {
                let mut seconds = f64::INFINITY;
                for _ in 0..3 {
                    seconds =
                        seconds.min(pass((&pool, &copies, &stage), &weights, &mut slots, copy)?);
                }
                Ok(weights.len() as f64 / seconds / 1e9)
            };
            let past = rate(copy_past_cache)?;
            let through = rate(|to, from| to.copy_from_slice(from))?;
            println!(
                "| {} | {} | {threads} | {past:.1} | {through:.1} |",
                slot_bytes >> 20,
                ring_bytes >> 20
            );
        }
    }
    Ok(())
}
