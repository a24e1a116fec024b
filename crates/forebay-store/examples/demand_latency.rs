//! Measures how long a demand read takes while a load saturates the disk. It varies the number of requests that the
//! load may have at the disk.
//!
//! `cargo run --release -p forebay-store --example demand_latency FILE [engine] [seconds per case]`

use std::time::{Duration, Instant};

use forebay_store::{
    Arena, BlockLabel, BlockLayout, BlockRead, EngineOptions, Extent, FileIndex, FileSet, IoKind,
    Priority, ReadEngine, SlotBuffer, open_engine,
};

const BLOCK_BYTES: u64 = 1 << 20;
const LOADING: u64 = 48;
const DEMAND: u64 = u64::MAX;

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let path = arguments.first().ok_or("usage: demand_latency FILE [engine] [seconds per case]")?;
    let kind: IoKind = arguments.get(1).map_or("auto", String::as_str).parse()?;
    let time = Duration::from_secs_f64(arguments.get(2).map_or(Ok(3.0), |text| text.parse())?);
    let files = FileSet::open(&[path])?;
    println!(
        "demand reads of 1 MiB while a load runs; the load has at most so many requests at the disk"
    );
    for background_depth in [0, 4, 8, 16, 32, 64] {
        let options = EngineOptions {
            queue_depth: background_depth + 8,
            background_depth: background_depth.max(1),
            ..EngineOptions::default()
        };
        let arena = Arena::reserve((LOADING as usize + 1) * (BLOCK_BYTES as usize + 4096))?;
        let engine = open_engine(kind, &files, &arena, &options)?;
        let mut case = Case { engine, files: &files, state: 12345, loaded_bytes: 0 };
        let waits = case.run(&arena, if background_depth == 0 { 0 } else { LOADING }, time)?;
        let at = |share: f64| 1e3 * waits[((waits.len() - 1) as f64 * share) as usize];
        println!(
            "load depth {background_depth:2}: load {:.2} GB/s; demand p50 {:.2} ms, p99 {:.2} ms, \
             most {:.2} ms, of {}",
            case.loaded_bytes as f64 / time.as_secs_f64() / 1e9,
            at(0.5),
            at(0.99),
            at(1.0),
            waits.len()
        );
    }
    Ok(())
}

struct Case<'a> {
    engine: Box<dyn ReadEngine>,
    files: &'a FileSet,
    state: u64,
    loaded_bytes: u64,
}

impl Case<'_> {
    fn begin(&mut self, id: u64, buffer: SlotBuffer, priority: Priority) {
        let bytes = self.files.file_bytes(FileIndex(0)).unwrap_or(0).saturating_sub(BLOCK_BYTES);
        self.state ^= self.state << 13;
        self.state ^= self.state >> 7;
        self.state ^= self.state << 17;
        let offset = self.state % (bytes / 4096).max(1) * 4096;
        let extent = Extent { file: FileIndex(0), offset, length: BLOCK_BYTES };
        let layout = BlockLayout::plan(&[extent], 4096);
        self.engine.submit(BlockRead {
            id,
            label: BlockLabel::Other(id),
            layout,
            buffer,
            priority,
        });
    }

    /// Runs demand reads with small pauses between them, and returns their durations in seconds, sorted.
    fn run(
        &mut self,
        arena: &Arena,
        loading: u64,
        time: Duration,
    ) -> Result<Vec<f64>, Box<dyn std::error::Error>> {
        let slot_bytes = BLOCK_BYTES as usize + 4096;
        for id in 0..loading {
            let buffer = arena.carve(slot_bytes)?;
            self.begin(id, buffer, Priority::Load);
        }
        let (mut waits, mut done) = (Vec::new(), Vec::new());
        let mut idle = Some(arena.carve(slot_bytes)?);
        let (started, mut asked) = (Instant::now(), Instant::now());
        while self.engine.in_flight() > 0 || started.elapsed() < time {
            let over = started.elapsed() >= time;
            if !over
                && asked.elapsed() > Duration::from_millis(3)
                && let Some(buffer) = idle.take()
            {
                asked = Instant::now();
                self.begin(DEMAND, buffer, Priority::Demand);
            }
            self.engine.poll(&mut done)?;
            for completion in done.drain(..) {
                completion.result?;
                let buffer = completion.buffer.ok_or("a read stalled")?;
                if completion.id == DEMAND {
                    waits.push(asked.elapsed().as_secs_f64());
                    (idle, asked) = (Some(buffer), Instant::now());
                } else if !over {
                    self.loaded_bytes += BLOCK_BYTES;
                    self.begin(completion.id, buffer, Priority::Load);
                }
            }
        }
        waits.sort_by(f64::total_cmp);
        Ok(waits)
    }
}
