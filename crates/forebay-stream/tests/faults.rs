//! Tests with a failing disk. A read gives the right bytes, or an error that says where it failed. Afterwards the
//! residency continues, or stops for good.

mod support;

use std::ops::Range;

use forebay_store::{FaultKind, FaultPlan, IoKind, ReadError};
use forebay_stream::{BlockId, ExpertIndex, FileIndex, LayerIndex, PolicyKind, StreamError};
use support::{LAYERS, Model, Random, batch, routing, step};

const EIO: i32 = 5;
const LAYER: LayerIndex = LayerIndex(2);
const EXPERT: ExpertIndex = ExpertIndex(4);

/// Returns the file and byte range of a block's last part.
fn place(model: &Model, block: BlockId) -> (FileIndex, Range<u64>) {
    let extent = model.block(block).extents.last().unwrap();
    (extent.file, extent.offset..extent.end())
}

fn experts(numbers: &[u32]) -> Vec<ExpertIndex> {
    numbers.iter().copied().map(ExpertIndex).collect()
}

/// Reads a batch that does not touch the broken expert's neighbours on disk.
fn works(model: &Model, residency: &mut forebay_stream::Residency) {
    batch(model, residency, LayerIndex(3), &experts(&[0, 8])).unwrap();
    batch(model, residency, LAYER, &experts(&[0, 8])).unwrap();
    let dense = residency.dense(1).unwrap();
    model.check(residency, &dense);
}

#[test]
fn passing_faults_are_invisible() {
    let model = Model::new(11);
    let (file, range) = place(&model, BlockId::Expert(LAYER, EXPERT));
    for kind in [FaultKind::Error(EIO), FaultKind::Short(512)] {
        for ram in model.budgets(3) {
            let faults = FaultPlan::once(file, range.clone(), kind);
            let mut residency = model.simulated(ram, PolicyKind::LAYER_LRU, faults);
            batch(&model, &mut residency, LAYER, &experts(&[1, 4, 6])).unwrap();
            assert!(residency.statistics().io.retries >= 1);
        }
    }
}

#[test]
fn a_disk_full_of_passing_faults() {
    let model = Model::new(12);
    let mut random = Random::new(3);
    for ram in model.budgets(4) {
        let faults = FaultPlan { random_one_in: 5, seed: 8, ..FaultPlan::default() };
        let mut residency = model.simulated(ram, PolicyKind::LAYER_LFU, faults);
        for _ in 0..30 {
            step(&model, &mut residency, &routing(&mut random, 3)).unwrap();
        }
        assert!(residency.statistics().io.retries > 5);
    }
}

#[test]
fn a_lasting_error_names_file_offset_and_block_and_spares_the_rest() {
    let model = Model::new(13);
    let (file, range) = place(&model, BlockId::Expert(LAYER, EXPERT));
    for ram in model.budgets(5) {
        let faults = FaultPlan::always(file, range.clone(), FaultKind::Error(EIO));
        let mut residency = model.simulated(ram, PolicyKind::LAYER_LRU, faults);
        works(&model, &mut residency);
        for _ in 0..3 {
            let error = batch(&model, &mut residency, LAYER, &experts(&[1, 4, 9])).unwrap_err();
            let StreamError::Read { block, cause } = &error else { panic!("{error}") };
            // The expert's neighbours share a request with it.
            assert!(matches!(block, BlockId::Expert(LAYER, ExpertIndex(3..=5))), "{block}");
            let ReadError::Io { offset, attempts, .. } = cause else { panic!("{error}") };
            assert!(*offset < range.end && *attempts > 1);
            let text = error.to_string();
            for part in
                ["expert 4 of layer 2", &format!("memory-{}", file.0), "at byte", "os error 5"]
            {
                assert!(text.contains(part), "{text}");
            }
            works(&model, &mut residency);
        }
    }
}

#[test]
fn a_dense_block_that_cannot_be_read() {
    let model = Model::new(14);
    let broken = BlockId::Dense(3);
    let (file, range) = place(&model, broken);
    for ram in model.budgets(4) {
        let faults =
            FaultPlan::always(file, range.start + 300..range.start + 301, FaultKind::Error(EIO));
        let mut residency = model.simulated(ram, PolicyKind::LAYER_LRU, faults);
        for _ in 0..3 {
            let mut failed = false;
            for index in 0..model.blocks.dense.len() as u32 {
                match residency.dense(index) {
                    Ok(lease) => model.check(&residency, &lease),
                    Err(StreamError::Read { block: BlockId::Dense(number), .. }) => {
                        failed |= number == 3;
                        assert_eq!(number, index, "read-ahead that fails is nobody's error");
                    }
                    Err(error) => panic!("{error}"),
                }
            }
            assert!(failed);
        }
    }
}

#[test]
fn preloading_reports_what_failed() {
    let model = Model::new(15);
    let (file, range) = place(&model, BlockId::Expert(LAYER, EXPERT));
    let faults = FaultPlan::always(file, range, FaultKind::Error(EIO));
    let mut residency = model.simulated(None, PolicyKind::LAYER_LRU, faults);
    let error = residency.preload(&mut |_, _| {}).unwrap_err();
    assert!(matches!(error, StreamError::Read { block: BlockId::Expert(LAYER, _), .. }), "{error}");
    works(&model, &mut residency);
    assert!(batch(&model, &mut residency, LAYER, &experts(&[1, 4])).is_err());
    works(&model, &mut residency);
}

#[test]
fn a_read_that_never_ends_stops_everything_with_its_name() {
    let model = Model::new(16);
    let (file, range) = place(&model, BlockId::Expert(LAYER, EXPERT));
    for kind in [IoKind::Auto, IoKind::Pread] {
        let folder = tempfile::tempdir().unwrap();
        let faults = FaultPlan::always(file, range.clone(), FaultKind::Never);
        let ram = model.budgets(3)[1];
        let mut residency =
            model.real(kind, folder.path(), ram, PolicyKind::LAYER_LRU, Some(faults));
        let error = batch(&model, &mut residency, LAYER, &experts(&[2, 4])).unwrap_err();
        let StreamError::Read { cause: ReadError::Stalled { .. }, .. } = &error else {
            panic!("{error}")
        };
        assert!(error.to_string().contains("expert 4 of layer 2"), "{error}");
        // The kernel may still write to the buffer. Nothing is read any more, and no wrong bytes are returned.
        let after = residency.dense(1).unwrap_err();
        assert!(matches!(after, StreamError::Stopped { .. }), "{after}");
        assert!(residency.begin_experts(LAYER, &experts(&[2])).is_err());
    }
}

#[test]
fn held_leases_are_an_error_not_a_deadlock() {
    let model = Model::new(17);
    let smallest = model.budgets(2)[0];
    let mut residency = model.simulated(smallest, PolicyKind::LAYER_LRU, FaultPlan::default());
    residency.begin_experts(LAYER, &experts(&[0, 1, 2, 3, 4, 5])).unwrap();
    let mut pass = Vec::new();
    let error = loop {
        match residency.next_experts(&mut pass) {
            Ok(more) => assert!(more),
            Err(error) => break error,
        }
    };
    assert!(matches!(error, StreamError::LeasesHoldAllSlots { .. }), "{error}");
    pass.iter().for_each(|(_, lease)| model.check(&residency, lease));
    pass.clear();
    batch(&model, &mut residency, LAYER, &experts(&[0, 1, 2, 3, 4, 5])).unwrap();

    let held: Vec<_> = (0..2).map(|index| residency.dense(index).unwrap()).collect();
    let error = residency.dense(2).unwrap_err();
    assert!(
        matches!(error, StreamError::LeasesHoldAllSlots { block: BlockId::Dense(2) }),
        "{error}"
    );
    held.iter().for_each(|lease| model.check(&residency, lease));
    drop(held);
    let dense = residency.dense(2).unwrap();
    model.check(&residency, &dense);
}

#[test]
fn wrong_requests_are_refused() {
    let model = Model::new(18);
    let mut residency = model.simulated(None, PolicyKind::LAYER_LRU, FaultPlan::default());
    let refused = |error: StreamError| matches!(error, StreamError::NoSuchBlock { .. });
    assert!(refused(residency.dense(99).unwrap_err()));
    assert!(refused(residency.begin_experts(LAYER, &experts(&[0, 10])).unwrap_err()));
    assert!(refused(residency.begin_experts(LayerIndex(0), &experts(&[0])).unwrap_err()));
    assert!(refused(residency.begin_experts(LayerIndex(LAYERS), &experts(&[0])).unwrap_err()));
    assert!(refused(residency.prefetch_experts(LayerIndex(77), &experts(&[0])).unwrap_err()));
    let twice = residency.begin_experts(LAYER, &experts(&[5, 1, 5])).unwrap_err();
    assert!(matches!(twice, StreamError::ExpertNamedTwice { layer: 2, expert: 5 }), "{twice}");
    assert!(matches!(residency.next_experts(&mut Vec::new()), Err(StreamError::NoBatch)));
    assert_eq!(residency.statistics().lookups, 0);
    works(&model, &mut residency);
}
