//! Tests of copies: the right bytes arrive in the new order, or there is an error. The page cache
//! does not change.

use std::sync::Mutex;

use forebay_format::pack::PackSpan;
use forebay_store::{
    Arena, CopyJob, CopyReport, EngineOptions, FaultKind, FaultPlan, FileIndex, OutputError,
    ReadError, Sink, StoreError, copy_through,
};

use crate::support::{Bench, Kind, Noise, extent, half_cached, kinds, open, small_requests};

const EIO: i32 = 5;
const BYTES: usize = 9_000_001;
const HEADER: &[u8] = b"what comes first";

/// A sink that collects all bytes, and fails when it gets the byte at `refuses`.
struct Collected {
    bytes: Mutex<Vec<u8>>,
    refuses: Option<u64>,
}

impl Sink for Collected {
    fn take(&self, offset: u64, bytes: &[u8]) -> Result<(), StoreError> {
        let end = offset + bytes.len() as u64;
        if self.refuses.is_some_and(|at| (offset..end).contains(&at)) {
            let cause = std::io::Error::from_raw_os_error(EIO);
            return Err(OutputError::Write { path: "out".into(), cause }.into());
        }
        self.bytes.lock().unwrap()[offset as usize..end as usize].copy_from_slice(bytes);
        Ok(())
    }
}

/// Returns pieces of odd sizes that copy the file from its end to its beginning, with gaps between
/// them.
fn spans() -> Vec<PackSpan> {
    let (mut noise, mut to, mut end, mut spans) = (Noise(9), 5000, BYTES as u64, Vec::new());
    while end > 700_000 {
        let length = 1 + noise.below(600_000);
        let from = extent(0, end - length, length);
        spans.push(PackSpan { to, from, tensor: 0, conversion: None });
        (to, end) = (to + length + noise.below(9000), end - length);
    }
    spans
}

fn bench(kind: Kind) -> Bench {
    Bench::new(kind, small_requests(), FaultPlan::default(), &[BYTES])
}

/// Copies all spans with a new engine. Returns the report and the copied bytes.
fn copied(
    bench: &Bench,
    kind: Kind,
    direct: bool,
    faults: FaultPlan,
    refuses: Option<u64>,
) -> Result<(CopyReport, Vec<u8>), StoreError> {
    let spans = spans();
    let bytes = spans.last().map_or(0, |span| span.to + span.from.length);
    let sink = Collected { bytes: Mutex::new(vec![0xA5; bytes as usize]), refuses };
    let refused = &|_| panic!("nothing is converted");
    let job = CopyJob { range: 0..bytes, header: HEADER, spans, refused, chunk_at: None };
    let opened = |arena: &Arena, options: &EngineOptions| {
        let options = EngineOptions { request_bytes: 64 << 10, direct, ..*options };
        open(kind, &bench.files, arena, &options, faults.clone())
    };
    let report = copy_through(&bench.files, &job, &opened, &sink, &mut |_, _| true)?;
    Ok((report, sink.bytes.into_inner().unwrap()))
}

fn expected(bench: &Bench) -> Vec<u8> {
    let spans = spans();
    let mut bytes = vec![0; spans.last().map_or(0, |s| s.to + s.from.length) as usize];
    bytes[..HEADER.len()].copy_from_slice(HEADER);
    for PackSpan { to, from, .. } in spans {
        let source = &bench.images[0][from.offset as usize..from.end() as usize];
        bytes[to as usize..][..source.len()].copy_from_slice(source);
    }
    bytes
}

#[test]
fn copies_are_exact_from_a_disk_that_stumbles() {
    for kind in kinds() {
        let bench = bench(kind);
        for random_one_in in [0, 6] {
            let faults = FaultPlan { random_one_in, seed: 3, ..FaultPlan::default() };
            let (report, bytes) = copied(&bench, kind, true, faults, None).unwrap();
            assert!(bytes == expected(&bench), "{kind:?}, one in {random_one_in}");
            assert!(report.bytes_read >= bytes.len() as u64 * 9 / 10, "{kind:?}");
        }
    }
}

#[test]
fn an_error_of_the_disk_or_of_the_sink_ends_a_copy() {
    for kind in kinds() {
        let bench = bench(kind);
        let at = FileIndex(0);
        let faults = FaultPlan::always(at, 5_000_000..5_000_001, FaultKind::Error(EIO));
        let error = copied(&bench, kind, true, faults, None).unwrap_err();
        assert!(matches!(error, StoreError::Block(ReadError::Io { .. })), "{kind:?}: {error}");
        let error = copied(&bench, kind, true, FaultPlan::default(), Some(6_000_000)).unwrap_err();
        assert!(
            matches!(error, StoreError::Output(OutputError::Write { .. })),
            "{kind:?}: {error}"
        );
    }
}

#[test]
fn a_file_that_shrinks_is_an_unexpected_end() {
    for kind in kinds().into_iter().filter(|&kind| kind != Kind::Simulated) {
        let bench = bench(kind);
        let path = bench.folder.path().join("weights-0");
        std::fs::File::options().write(true).open(path).unwrap().set_len(4_000_003).unwrap();
        let error = copied(&bench, kind, true, FaultPlan::default(), None).unwrap_err();
        let expected = matches!(error, StoreError::Block(ReadError::UnexpectedEnd { .. }));
        assert!(expected, "{kind:?}: {error}");
        assert!(error.to_string().contains("weights-0"), "{error}");
    }
}

#[test]
fn the_page_cache_keeps_what_it_has_and_gets_nothing_new() {
    for direct in [true, false] {
        let bench = bench(Kind::Pread);
        if bench.files.drop_cached().is_err() {
            // `half_cached` prints the reason.
            half_cached(&bench.files);
            return;
        }
        let cached = || bench.files.cached_bytes().unwrap().0;
        copied(&bench, Kind::Pread, direct, FaultPlan::default(), None).unwrap();
        assert_eq!(cached(), 0, "direct {direct}, of {BYTES}");

        half_cached(&bench.files);
        let before = cached();
        let done = copied(&bench, Kind::Pread, direct, FaultPlan::default(), None).unwrap();
        assert!(cached() >= before, "direct {direct}: {before}, then {}", cached());
        assert!(!done.0.engine.direct || cached() == before);
    }
}
