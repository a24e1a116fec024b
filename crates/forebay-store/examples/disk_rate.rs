//! Measures how fast an engine reads on this machine: random blocks of the size of experts, and one sequential stream.
//!
//! `cargo run --release -p forebay-store --example disk_rate FILE [engine] [request KiB] [depth]
//! [seconds]`

use std::time::{Duration, Instant};

use forebay_store::{
    Arena, BlockLabel, BlockLayout, BlockRead, Completion, EngineOptions, Extent, FileIndex,
    FileSet, IoKind, Priority, ReadEngine, StoreError, open_engine,
};

/// Number of blocks in flight at a time: about the experts of one layer for two tokens.
const BLOCKS: usize = 18;
const BLOCK_BYTES: u64 = 1 << 20;

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let path = arguments.first().ok_or(
        "usage: disk_rate FILE [auto|uring|pread] [request KiB] [depth] [seconds per case]",
    )?;
    let number = |index: usize, default: usize| {
        arguments.get(index).map_or(Ok(default), |text| text.parse::<usize>())
    };
    let kind: IoKind = arguments.get(1).map_or("auto", String::as_str).parse()?;
    let depth = number(3, 64)?;
    let options = EngineOptions {
        request_bytes: number(2, 512)? << 10,
        queue_depth: depth,
        background_depth: depth,
        threads: depth.min(8),
        ..EngineOptions::default()
    };
    let time = Duration::from_secs(number(4, 3)? as u64);

    let files = FileSet::open(&[path])?;
    let file_bytes = files.file_bytes(FileIndex(0)).unwrap_or(0);
    if file_bytes < 64 * BLOCK_BYTES {
        return Err("the file should have at least 64 MiB".into());
    }
    for sequential in [false, true] {
        let arena = Arena::reserve(BLOCKS * (BLOCK_BYTES as usize + 8192))?;
        let mut engine = open_engine(kind, &files, &arena, &options)?;
        let info = engine.describe();
        let place = Places { file_bytes, sequential, state: 12345 };
        let bytes_per_second = measure(engine.as_mut(), &files, &arena, place, time)?;
        let statistics = engine.io_statistics();
        println!(
            "{} direct={} registered={} request={} KiB depth={depth} {}: {:.2} GB/s, busy {:.1} s, \
             {} requests, over-read {:.2} %{}",
            info.name,
            info.direct,
            info.registered_buffers,
            options.request_bytes >> 10,
            if sequential { "sequential" } else { "random 1 MiB x 18" },
            bytes_per_second / 1e9,
            statistics.busy_seconds,
            statistics.requests,
            100.0 * (statistics.bytes_read as f64 / statistics.bytes_requested as f64 - 1.0),
            if info.why.is_empty() { String::new() } else { format!(" ({})", info.why) },
        );
    }
    let arena = Arena::reserve(BLOCKS * (BLOCK_BYTES as usize + 8192))?;
    let mut engine = open_engine(kind, &files, &arena, &options)?;
    let place = Places { file_bytes, sequential: false, state: 99 };
    let nanoseconds = poll_cost(engine.as_mut(), &files, &arena, place)?;
    println!("a poll that finds nothing finished: {nanoseconds:.0} ns");
    Ok(())
}

/// Returns the mean cost of a poll in nanoseconds while blocks are being read.
fn poll_cost(
    engine: &mut dyn ReadEngine,
    files: &FileSet,
    arena: &Arena,
    mut places: Places,
) -> Result<f64, Box<dyn std::error::Error>> {
    let (mut done, mut spent, mut polls) = (Vec::new(), Duration::ZERO, 0);
    for id in 0..BLOCKS as u64 {
        let layout = BlockLayout::plan(&[places.next(id)], files.alignment());
        let buffer = arena.carve(layout.slot_bytes)?;
        let (label, priority) = (BlockLabel::Other(id), Priority::Demand);
        engine.submit(BlockRead { id, label, layout, buffer, priority });
    }
    while engine.in_flight() > 0 {
        let requests = engine.io_statistics().bytes_read;
        let started = Instant::now();
        for _ in 0..16 {
            engine.poll(&mut done)?;
        }
        if engine.io_statistics().bytes_read == requests {
            spent += started.elapsed();
            polls += 16;
        }
        done.clear();
    }
    Ok(spent.as_nanos() as f64 / f64::from(polls.max(1)))
}

/// Generator of the positions of blocks.
struct Places {
    file_bytes: u64,
    sequential: bool,
    state: u64,
}

impl Places {
    fn next(&mut self, index: u64) -> Extent {
        let offset = if self.sequential {
            index % (self.file_bytes / BLOCK_BYTES) * BLOCK_BYTES
        } else {
            self.state ^= self.state << 13;
            self.state ^= self.state >> 7;
            self.state ^= self.state << 17;
            // Tensors in a GGUF file begin at multiples of 32 bytes.
            self.state % (self.file_bytes - BLOCK_BYTES) / 32 * 32
        };
        Extent { file: FileIndex(0), offset, length: BLOCK_BYTES }
    }
}

/// Keeps `BLOCKS` reads in flight for `time`, and returns the number of bytes requested per second.
fn measure(
    engine: &mut dyn ReadEngine,
    files: &FileSet,
    arena: &Arena,
    mut places: Places,
    time: Duration,
) -> Result<f64, Box<dyn std::error::Error>> {
    let alignment = files.alignment();
    let mut index = 0;
    let mut next = |buffer| {
        let layout = BlockLayout::plan(&[places.next(index)], alignment);
        index += 1;
        let label = BlockLabel::Other(index);
        BlockRead { id: index, label, layout, buffer, priority: Priority::Demand }
    };
    for _ in 0..BLOCKS {
        let buffer = arena.carve(BLOCK_BYTES as usize + 8192)?;
        engine.submit(next(buffer));
    }
    let started = Instant::now();
    let mut done: Vec<Completion> = Vec::new();
    let mut bytes = 0_u64;
    while engine.in_flight() > 0 {
        engine.wait(&mut done)?;
        let over = started.elapsed() >= time;
        for completion in done.drain(..) {
            completion.result?;
            bytes += BLOCK_BYTES;
            let buffer = completion
                .buffer
                .ok_or(StoreError::Unavailable { engine: "read", why: "lost a slot".into() })?;
            if !over {
                engine.submit(next(buffer));
            }
        }
    }
    Ok(bytes as f64 / started.elapsed().as_secs_f64())
}
