//! Experts that a CUDA graph requests from the host: what is copied, and what the tables contain afterwards.

use std::sync::Arc;
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, ensure};
use forebay_cuda::{
    AddressTables, DeviceMemory, DevicePtr, ExpertAnswer, ExpertFetch, ExpertMailbox, ExpertMiss,
    ExpertQuestion, ExpertReturn, FetchedLayer, GivingUp, Pinned, TableSize,
};
use forebay_store::{Arena, SlotBuffer};

use crate::bench::{Bench, Measured, median_seconds};
use crate::harness::{Check, Context, Outcome};
use crate::random::Random;

/// Longest time that a question may take on an emulated device.
const PATIENCE: Duration = Duration::from_secs(20);

pub fn checks() -> Vec<Check> {
    let check = |name: &str, sizes, shifts| {
        Check::new(name, move |context| fetched(context, sizes, shifts))
    };
    vec![
        check("fetch aligned experts", [4096, 48, 70_000], [0, 16, 32]),
        check("fetch experts from odd addresses", [1003, 33, 40_001], [1, 6, 15]),
        check("fetch experts from multiples of four", [64, 15, 8196], [4, 8, 12]),
        Check::new("fetch for many rows", |context| fetched_for_rows(context, None)),
        Check::new("fetch beside other kernels", |context| fetched_for_rows(context, Some(0))),
        Check::new("fetch from the second lane", |context| fetched_for_rows(context, Some(1))),
        Check::new("fetch gives up without an answer", |context| gives_up(context, true)),
        Check::new("fetch gives up without rows", |context| gives_up(context, false)),
    ]
}

pub fn benches() -> Vec<Bench> {
    let blocks = [4, 8, 16, 32, 64, 128];
    let bench = |(misses, shift, blocks)| {
        let name = format!("fetch {misses} experts of 2.9 MB, shift {shift}, {blocks} blocks");
        Bench::new(name, move |context| bench(context, misses, shift, blocks))
    };
    let back = |(shift, blocks)| {
        let name = format!("fetch 4 experts of 2.9 MB and 4 back, shift {shift}, {blocks} blocks");
        Bench::new(name, move |context| bench_both_ways(context, shift, blocks))
    };
    let both_ways = [(0, 16), (0, 32), (0, 64), (4, 16), (4, 32)].map(back);
    let aligned = blocks.map(|blocks| (4, 0, blocks));
    let others = [(1, 0, 8), (1, 0, 16), (1, 0, 32), (4, 4, 16), (4, 1, 16)];
    aligned.into_iter().chain(others).map(bench).chain(both_ways).collect()
}

/// Pinned memory of random bytes.
struct Source {
    // Declared before the memory that it pins, so that it is dropped first.
    pinned: Pinned,
    slot: SlotBuffer,
    /// Memory that kernels write.
    back: Vec<SlotBuffer>,
}

/// Memory for an expert that goes back to the host.
struct Back(SlotBuffer);

impl AsMut<[u8]> for Back {
    fn as_mut(&mut self) -> &mut [u8] {
        self.0.as_mut_slice()
    }
}

impl Source {
    /// Reserves `bytes` to read, and `back` pieces of `back_bytes` to write.
    fn new(context: &Context, bytes: usize, (back, back_bytes): (usize, usize)) -> Result<Source> {
        let arena = Arena::reserve(bytes + back * back_bytes)?;
        let mut slot = arena.carve(bytes)?;
        let back = (0..back).map(|_| arena.carve(back_bytes)).collect::<Result<_, _>>()?;
        let mut random = Random::new(11);
        for chunk in slot.as_mut_slice().chunks_mut(4) {
            chunk.copy_from_slice(&random.next().to_le_bytes()[..chunk.len()]);
        }
        let pinned = context.gpu.pin(arena.addresses(), arena.clone())?;
        Ok(Source { pinned, slot, back })
    }

    fn bytes(&self, at: usize, bytes: usize) -> &[u8] {
        &self.slot.as_slice()[at..at + bytes]
    }
}

/// Buffers that a fetching kernel and its host share.
struct Desk {
    mailbox: ExpertMailbox<Back>,
    words: DeviceMemory,
    _desk: DeviceMemory,
    _x: DeviceMemory,
    tables: Arc<AddressTables>,
    fetch: ExpertFetch,
}

const EXPERTS: usize = 24;
/// Index of the layer's first expert in the tables.
const FIRST: usize = 16;
const K: usize = 3;
/// State that goes to the host with a question.
const STATE: [f32; 8] = [1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0, 8.0];

impl Desk {
    fn new(
        context: &Context,
        memory: &Arc<DeviceMemory>,
        k: usize,
        parts: [(u64, u64); 3],
        blocks: u32,
    ) -> Result<Desk> {
        let gpu = &context.gpu;
        // `now` [2], tickets [2], ids [k], forced [k].
        let words = gpu.allocate_with(&vec![0_u32; 4 + 2 * k])?;
        let slot_bytes = parts[2].0 + parts[2].1;
        let table = |entries| TableSize { entries, slot_bytes };
        let of_layer = table(EXPERTS - FIRST);
        let sizes = [table(FIRST), of_layer, of_layer, of_layer];
        let tables = Arc::new(gpu.address_tables(memory.clone(), &sizes)?);
        let desk = gpu.allocate_with(&vec![0_u32; ExpertFetch::desk_words(k)])?;
        let x = context.upload(&STATE)?;
        let at = |word: usize| words.ptr::<u32>().offset(word);
        let fetch = ExpertFetch {
            now: at(0),
            k,
            room: k,
            always: false,
            tickets: at(2),
            desk: desk.ptr(),
            x: x.ptr(),
            ids: at(4),
            forced: at(4 + k),
            blocks,
            giving_up: None,
        };
        let layers = vec![FetchedLayer { table: 1, slots: 2, present: 3, parts }; 2];
        let mailbox = ExpertMailbox::new(gpu, tables.clone(), layers, k, STATE.len())?;
        Ok(Desk { mailbox, words, _desk: desk, _x: x, tables, fetch })
    }

    fn upload(&self, context: &Context, run: u32, ids: &[u32], forced: &[u32]) -> Result<()> {
        let gpu = &context.gpu;
        gpu.upload(&[run, u32::from(!forced.is_empty())], self.fetch.now)?;
        gpu.upload(ids, self.fetch.ids)?;
        Ok(gpu.upload(forced, self.fetch.forced)?)
    }

    /// Returns all entries of the tables of experts.
    fn table(&self, context: &Context) -> Result<Vec<u64>> {
        let mut all = self.tables.download(&context.gpu, 0)?;
        all.extend(self.tables.download(&context.gpu, 1)?);
        Ok(all)
    }

    /// Returns the address of each pair's expert, as the ids and a table of chosen experts on the device give it.
    fn slots(&self, context: &Context, table: usize) -> Result<Vec<u64>> {
        let slots = self.tables.download(&context.gpu, table)?;
        let ids: Vec<u32> = context.gpu.download(self.fetch.ids, self.fetch.k)?;
        Ok(ids.into_iter().map(|id| slots[id as usize]).collect())
    }

    /// Waits for the question of a place.
    fn question(&mut self, place: usize, run: u32, asked: &mut [u32]) -> Result<ExpertQuestion> {
        let began = Instant::now();
        loop {
            if let Some(question) = self.mailbox.question(place, run, asked) {
                return Ok(question);
            }
            ensure!(began.elapsed() < PATIENCE, "run {run}: no question came");
        }
    }
}

/// Checks the rows after a run. The first row of the last run is the one that the host computed. No kernel has written
/// the others.
fn rows_of(run: u32, rows: &[f32]) -> Outcome {
    let bits = |rows: &[f32]| rows.iter().map(|x| x.to_bits()).collect::<Vec<u32>>();
    let (first, others) = rows.split_at(STATE.len());
    let all_nan = others.iter().all(|x| x.is_nan());
    let outcome = Outcome::same(&[all_nan], &[true]).at("other rows");
    match run {
        3 => outcome.worse(Outcome::same(&bits(first), &bits(&STATE.map(|x| 10.0 * x))).at("row")),
        _ => outcome,
    }
}

/// Runs three tokens: one with misses, one whose experts are all there, and one with forced experts. In the last one,
/// one expert is evicted to pinned memory, and the host computes another.
fn fetched(context: &Context, bytes: [usize; 3], shifts: [usize; 3]) -> Result<Outcome> {
    let gpu = &context.gpu;
    let Source { pinned, slot: source, back: goes_to } =
        Source::new(context, 1 << 20, (1, 1 << 20))?;
    let source = source.as_slice();
    let mut goes_to = goes_to.into_iter().map(Back).next();
    let mut came_back = None;
    // A byte beside each part must not change.
    let mut offsets = [0; 3];
    for part in 1..3 {
        offsets[part] = (offsets[part - 1] + bytes[part - 1] + 1).next_multiple_of(16);
    }
    let slot_bytes = (offsets[2] + bytes[2] + 1).next_multiple_of(16);
    let memory = Arc::new(gpu.allocate(4 * slot_bytes)?);
    gpu.fill(memory.ptr(), 0xa5, 4 * slot_bytes)?;
    let parts = [0, 1, 2].map(|part| (offsets[part] as u64, bytes[part] as u64));
    let mut desk = Desk::new(context, &memory, K, parts, 3)?;
    let slot = |number: usize| memory.ptr::<u8>().offset(number * slot_bytes);
    let from =
        |number: usize| [0, 1, 2].map(|part| 256 * (100 * part + 10 * number) + shifts[part]);
    let miss = |number: usize, stays_as: Option<u32>| ExpertMiss {
        stays_as,
        to: slot(number),
        from: Some([0, 1, 2].map(|part| &source[from(number)[part]..][..bytes[part]])),
    };
    // The evicted expert goes to other odd addresses. It is a little smaller, as if it belonged to another layer.
    let back = |part: usize| 300_001 + 100_000 * part + 3 * shifts[part];
    let back_bytes = |part: usize| bytes[part] - part;
    let rows = context.poisoned(K * STATE.len())?;
    let mut slots_held: [Option<usize>; 4] = [None; 4];
    let mut table = [0_u64; EXPERTS];
    let mut outcome = Outcome::same::<u8>(&[], &[]);
    for run in 1..=3 {
        let (ids, forced): ([u32; K], &[u32]) = match run {
            1 => ([5, 0, 7], &[]),
            2 => ([5, 0, 5], &[]),
            _ => ([1, 2, 3], &[7, 1, 5]),
        };
        let chosen = if forced.is_empty() { ids } else { [forced[0], forced[1], forced[2]] };
        desk.upload(context, run, &ids, forced)?;
        gpu.fetch_experts(&desk.fetch, &desk.mailbox, 1, None)?;
        gpu.take_rows(&desk.fetch, &desk.mailbox, 1, rows.ptr())?;
        let mut asked = [0; K];
        let question = desk.question(1, run, &mut asked)?;
        let is_waiting = question == ExpertQuestion::Waiting;
        outcome = outcome.worse(Outcome::same(&asked, &chosen).at("asked for"));
        outcome = outcome.worse(Outcome::same(&[is_waiting], &[run != 2]).at("waits"));
        let at = |id: u32| FIRST + id as usize;
        let slots = match run {
            1 => {
                let misses = [miss(0, Some(5)), miss(1, Some(0)), miss(2, None)];
                let slots = [slot(0), slot(1), slot(2)];
                let answer = ExpertAnswer { slots: &slots, gone: &[], room: desk.fetch.room };
                let nothing = [].into_iter();
                desk.mailbox.answer(gpu, 1, run, &answer, misses.into_iter(), nothing, &pinned);
                (table[at(5)], table[at(0)]) = (slot(0).address(), slot(1).address());
                slots_held = [Some(0), Some(1), Some(2), None];
                slots
            }
            2 => [slot(0), slot(1), slot(0)],
            _ => {
                let slots = [DevicePtr::null(), slot(3), slot(0)];
                let (misses, gone) = ([miss(3, Some(1))], [at(0) as u32]);
                let returns = goes_to.take().map(|to| ExpertReturn {
                    from: offsets.map(|offset| slot(1).offset(offset)),
                    to,
                    ranges: [0, 1, 2].map(|part| back(part)..back(part) + back_bytes(part)),
                });
                let answer = ExpertAnswer { slots: &slots, gone: &gone, room: desk.fetch.room };
                let (misses, returns) = (misses.into_iter(), returns.into_iter());
                desk.mailbox.answer(gpu, 1, run, &answer, misses, returns, &pinned);
                let nothing = desk.mailbox.returned(gpu).is_none();
                outcome = outcome.worse(Outcome::same(&[nothing], &[true]).at("too early"));
                (table[at(1)], table[at(0)]) = (slot(3).address(), 0);
                slots_held[3] = Some(3);
                // The host computes this expert.
                let mut x = [0.0; STATE.len()];
                desk.mailbox.read_state(&mut x);
                outcome = outcome.worse(Outcome::same(&x, &STATE).at("state"));
                desk.mailbox.write_row(0, &x.map(|x| 10.0 * x));
                desk.mailbox.rows_are_there(1, run);
                slots
            }
        };
        gpu.synchronize()?;
        came_back = came_back.or(desk.mailbox.returned(gpu));
        let got = desk.slots(context, 2)?;
        outcome = outcome.worse(Outcome::same(&got, &slots.map(DevicePtr::address)).at("slots"));
        let got = desk.table(context)?;
        outcome = outcome.worse(Outcome::same(&got, &table).at("tables"));
        let got: Vec<u32> = gpu.download(desk.words.ptr::<u32>().offset(2), 2)?;
        outcome = outcome.worse(Outcome::same(&got, &[0, 0]).at("tickets"));
        let got: Vec<f32> = gpu.download(rows.ptr(), K * STATE.len())?;
        outcome = outcome.worse(rows_of(run, &got));
        let got: Vec<u8> = gpu.download(memory.ptr(), 4 * slot_bytes)?;
        let mut expected = vec![0xa5; 4 * slot_bytes];
        for number in slots_held.into_iter().flatten() {
            for (part, at) in from(number).into_iter().enumerate() {
                let to = number * slot_bytes + offsets[part];
                expected[to..to + bytes[part]].copy_from_slice(&source[at..][..bytes[part]]);
            }
        }
        outcome = outcome.worse(Outcome::same(&got, &expected).at(&format!("run {run}")));
    }
    // Memory of an arena is zeroed at first.
    let mut expected = vec![0; source.len()];
    for (part, at) in from(1).into_iter().enumerate() {
        let (to, bytes) = (back(part), back_bytes(part));
        expected[to..to + bytes].copy_from_slice(&source[at..][..bytes]);
    }
    let mut came_back = came_back.context("nothing came back")?;
    Ok(outcome.worse(Outcome::same(came_back.as_mut(), &expected).at("what went back")))
}

/// An expert that comes to the device.
struct Comes {
    id: u32,
    slot: usize,
    stays: bool,
    /// False if its bytes are in the slot already.
    is_copied: bool,
}

/// Fetches experts for the pairs of many rows, most of which share an expert with another row. Then again, when all are
/// there, and then with other experts, one of which takes the slot of an expert that leaves. Then again with one whose bytes were
/// left in its slot. If it is done beside other kernels, for a lane, one table must name the experts that were there, and another
/// the fetched ones.
fn fetched_for_rows(context: &Context, lane: Option<usize>) -> Result<Outcome> {
    const BYTES: usize = 4096;
    const PAIRS: usize = 100;
    const SLOTS: usize = 6;
    let gpu = &context.gpu;
    let source = Source::new(context, 1 << 20, (0, 0))?;
    let memory = Arc::new(gpu.allocate(SLOTS * 3 * BYTES)?);
    gpu.fill(memory.ptr(), 0xa5, memory.bytes())?;
    let parts = [0, 1, 2].map(|part| (part * BYTES as u64, BYTES as u64));
    let mut desk = Desk::new(context, &memory, PAIRS, parts, 3)?;
    let slot = |number: usize| memory.ptr::<u8>().offset(number * 3 * BYTES);
    let from = |id: u32| [0, 1, 2].map(|part| 32_768 * (3 * id as usize + part) + 16);
    let side = gpu.side_stream()?;
    // Expert in each slot, if any.
    let mut held: [Option<u32>; SLOTS] = [None; SLOTS];
    let mut outcome = Outcome::same::<u8>(&[], &[]);
    let comes = |id, slot| Comes { id, slot, stays: true, is_copied: true };
    let four_comes = |stays| Comes { stays, is_copied: !stays, ..comes(4, 5) };
    // Experts that are chosen, those of them that come, and those that leave.
    let runs: [(&[u32], Vec<Comes>, &[u32]); 4] = [
        (&[6, 0, 3, 7], vec![comes(0, 0), comes(3, 1), comes(6, 2), comes(7, 3)], &[]),
        (&[7, 6, 0], vec![], &[]),
        (&[1, 0, 2, 4], vec![comes(1, 3), comes(2, 4), four_comes(false)], &[7]),
        (&[4, 2], vec![four_comes(true)], &[]),
    ];
    let mut in_table = Vec::new();
    for (run, (experts, comes, leaves)) in (1..).zip(runs) {
        let ids: Vec<u32> =
            (0..PAIRS).map(|pair| experts[(7 * pair + pair / 5) % experts.len()]).collect();
        let (ids, forced) = if run == 3 { (vec![0; PAIRS], ids) } else { (ids, Vec::new()) };
        let chosen = if forced.is_empty() { ids.clone() } else { forced.clone() };
        desk.upload(context, run, &ids, &forced)?;
        if let Some(lane) = lane {
            gpu.fork_lanes()?;
            gpu.enter_lane(lane);
            gpu.find_experts(&desk.fetch, &desk.mailbox, 0, false)?;
            side.fork(gpu)?;
        }
        gpu.fetch_experts(&desk.fetch, &desk.mailbox, 0, lane.map(|_| &side))?;
        if let Some(lane) = lane {
            side.set_mark(lane)?;
        }
        let mut asked = [0; PAIRS];
        let question = desk.question(0, run, &mut asked)?;
        outcome = outcome.worse(Outcome::same(&asked[..], &chosen).at("asked for"));
        let is_waiting = question == ExpertQuestion::Waiting;
        outcome = outcome.worse(Outcome::same(&[is_waiting], &[!comes.is_empty()]).at("waits"));
        comes.iter().for_each(|expert| held[expert.slot] = Some(expert.id));
        in_table.retain(|id| !leaves.contains(id));
        in_table.extend(comes.iter().filter(|expert| expert.stays).map(|expert| expert.id));
        let slot_of = |id: u32| held.iter().position(|of| *of == Some(id)).map(slot);
        let slots: Option<Vec<DevicePtr<u8>>> = chosen.iter().map(|&id| slot_of(id)).collect();
        let slots = slots.context("every chosen expert has a slot")?;
        if is_waiting {
            let misses = comes.iter().map(|expert| ExpertMiss {
                stays_as: expert.stays.then_some(expert.id),
                to: slot(expert.slot),
                from: expert.is_copied.then(|| from(expert.id).map(|at| source.bytes(at, BYTES))),
            });
            let gone: Vec<u32> = leaves.iter().map(|id| FIRST as u32 + id).collect();
            let answer = ExpertAnswer { slots: &slots, gone: &gone, room: desk.fetch.room };
            let nothing = [].into_iter();
            desk.mailbox.answer(gpu, 0, run, &answer, misses, nothing, &source.pinned);
        }
        if let Some(lane) = lane {
            side.join_mark(gpu, lane)?;
            gpu.enter_lane(0);
            gpu.join_lanes()?;
        }
        gpu.synchronize()?;
        let is_fetched = |id: &u32| comes.iter().any(|expert| expert.id == *id);
        let named = |is_named: &dyn Fn(&u32) -> bool| -> Vec<u64> {
            let of_pair = chosen.iter().zip(&slots);
            of_pair.map(|(id, slot)| if is_named(id) { slot.address() } else { 0 }).collect()
        };
        let expected = named(&|id| lane.is_none() || is_fetched(id));
        outcome = outcome.worse(Outcome::same(&desk.slots(context, 2)?, &expected).at("slots"));
        if lane.is_some() {
            let (got, expected) = (desk.slots(context, 3)?, named(&|id| !is_fetched(id)));
            outcome = outcome.worse(Outcome::same(&got, &expected).at("experts that were there"));
        }
        let mut table = [0_u64; EXPERTS];
        let mut expected = vec![0xa5; memory.bytes()];
        for (number, id) in held.iter().enumerate().filter_map(|(at, id)| Some((at, (*id)?))) {
            if in_table.contains(&id) {
                table[FIRST + id as usize] = slot(number).address();
            }
            for (part, at) in from(id).into_iter().enumerate() {
                let bytes = &source.slot.as_slice()[at..][..BYTES];
                expected[(3 * number + part) * BYTES..][..BYTES].copy_from_slice(bytes);
            }
        }
        outcome = outcome.worse(Outcome::same(&desk.table(context)?, &table).at("tables"));
        let got: Vec<u8> = gpu.download(memory.ptr(), memory.bytes())?;
        outcome = outcome.worse(Outcome::same(&got, &expected).at(&format!("run {run}")));
    }
    Ok(outcome)
}

/// How long kernels wait before they give up, and how much later the host answers.
const BOUND: Duration = Duration::from_millis(40);
const LATE: Duration = Duration::from_millis(120);

/// Runs two layers whose host is late: with the answer of the first layer, or with the row that it computes for it. The
/// run must end by itself, and change only tables that the answer names. The same kernels, queued again when everything
/// is there, must give the usual result.
fn gives_up(context: &Context, without_answer: bool) -> Result<Outcome> {
    const BYTES: usize = 4096;
    let gpu = &context.gpu;
    let source = Source::new(context, 1 << 20, (0, 0))?;
    let memory = Arc::new(gpu.allocate(3 * 3 * BYTES)?);
    gpu.fill(memory.ptr(), 0xa5, memory.bytes())?;
    let parts = [0, 1, 2].map(|part| (part * BYTES as u64, BYTES as u64));
    let mut desk = Desk::new(context, &memory, K, parts, 3)?;
    let kept = context.poisoned(STATE.len())?;
    let run_word = gpu.allocate_with(&[0_u32])?;
    let stream: Vec<f32> = STATE.iter().map(|x| x + 0.5).collect();
    let stream = context.upload(&stream)?;
    let giving_up = GivingUp {
        bound: BOUND,
        run: run_word.ptr(),
        stream: stream.ptr(),
        kept: kept.ptr(),
        width: STATE.len(),
    };
    desk.fetch.giving_up = Some(giving_up);
    let rows = context.poisoned(K * STATE.len())?;
    let (run, ids) = (7, [5, 2, 6]);
    desk.upload(context, run, &ids, &[])?;
    let slot = |number: usize| memory.ptr::<u8>().offset(number * 3 * BYTES);
    let from = |number: usize| [0, 1, 2].map(|part| 65_536 * (3 * number + part) + 16);
    let miss = |number: usize, id: u32| ExpertMiss {
        stays_as: Some(id),
        to: slot(number),
        from: Some(from(number).map(|at| source.bytes(at, BYTES))),
    };
    // The host computes the last of the three experts.
    let slots = [slot(0), slot(1), DevicePtr::null()];
    let misses = [miss(0, ids[0]), miss(1, ids[1])];
    let answer = ExpertAnswer { slots: &slots, gone: &[], room: desk.fetch.room };
    let answer = |desk: &mut Desk| {
        let nothing = [].into_iter();
        desk.mailbox.answer(gpu, 0, run, &answer, misses.into_iter(), nothing, &source.pinned);
    };
    if !without_answer {
        answer(&mut desk);
    }
    let began = Instant::now();
    for place in [0, 1] {
        gpu.fetch_experts(&desk.fetch, &desk.mailbox, place, None)?;
        gpu.take_rows(&desk.fetch, &desk.mailbox, place, rows.ptr())?;
    }
    let mut asked = [0; K];
    while desk.mailbox.question(1, run, &mut asked).is_none() {
        ensure!(began.elapsed() < PATIENCE, "no question of the second layer came");
    }
    let question = desk.mailbox.question(1, run, &mut asked);
    gpu.synchronize()?;
    let waited = began.elapsed();
    ensure!(waited >= BOUND, "the run gave up after {waited:?}");
    std::thread::sleep(LATE.saturating_sub(waited));
    let is_given_up = question == Some(ExpertQuestion::GivenUp);
    let mut outcome = Outcome::same(&[is_given_up], &[true]).at("second question");
    let given_up = desk.mailbox.given_up(run);
    outcome = outcome.worse(Outcome::same(&[given_up], &[Some(0)]).at("place"));
    let got: Vec<f32> = gpu.download(kept.ptr(), STATE.len())?;
    outcome = outcome.worse(Outcome::same(&got, &STATE.map(|x| x + 0.5)).at("what was kept"));
    let mut table = [0_u64; EXPERTS];
    let answered = [(ids[0], slots[0]), (ids[1], slots[1])];
    let named = |table: &mut [u64; EXPERTS]| {
        for (id, slot) in answered {
            table[FIRST + id as usize] = slot.address();
        }
    };
    if !without_answer {
        named(&mut table);
    }
    let got = desk.table(context)?;
    outcome = outcome.worse(Outcome::same(&got, &table).at("tables of the run that gave up"));
    // The host now has what was missing, and continues.
    if without_answer {
        answer(&mut desk);
        named(&mut table);
    }
    desk.mailbox.write_row(2, &STATE.map(|x| 10.0 * x));
    desk.mailbox.rows_are_there(0, run);
    desk.mailbox.forget_given_up(gpu, &giving_up)?;
    gpu.fetch_experts(&desk.fetch, &desk.mailbox, 0, None)?;
    gpu.take_rows(&desk.fetch, &desk.mailbox, 0, rows.ptr())?;
    gpu.synchronize()?;
    outcome = outcome.worse(Outcome::same(&[desk.mailbox.given_up(run)], &[None]).at("anew"));
    let got = desk.slots(context, 2)?;
    outcome = outcome.worse(Outcome::same(&got, &slots.map(DevicePtr::address)).at("slots"));
    let got = desk.table(context)?;
    outcome = outcome.worse(Outcome::same(&got, &table).at("tables"));
    let got: Vec<f32> = gpu.download(rows.ptr::<f32>().offset(2 * STATE.len()), STATE.len())?;
    outcome = outcome.worse(Outcome::same(&got, &STATE.map(|x| 10.0 * x)).at("row"));
    let got: Vec<u8> = gpu.download(memory.ptr(), memory.bytes())?;
    let mut expected = vec![0xa5; memory.bytes()];
    for (number, part) in [(0, 0), (0, 1), (0, 2), (1, 0), (1, 1), (1, 2)] {
        let bytes = &source.slot.as_slice()[from(number)[part]..][..BYTES];
        expected[(3 * number + part) * BYTES..][..BYTES].copy_from_slice(bytes);
    }
    Ok(outcome.worse(Outcome::same(&got, &expected).at("what was copied")))
}

fn bench(context: &Context, misses: usize, shift: usize, blocks: u32) -> Result<Measured> {
    bench_ways(context, (misses, 0), shift, blocks)
}

fn bench_both_ways(context: &Context, shift: usize, blocks: u32) -> Result<Measured> {
    bench_ways(context, (4, 4), shift, blocks)
}

/// Measures a fetch. Only the bytes of one direction count.
fn bench_ways(
    context: &Context,
    (misses, back): (usize, usize),
    shift: usize,
    blocks: u32,
) -> Result<Measured> {
    const PART: usize = 983_040;
    let gpu = &context.gpu;
    let Source { pinned, slot: source, back: places } =
        Source::new(context, 48 << 20, (back, 8 << 20))?;
    let memory = Arc::new(gpu.allocate(8 * 3 * PART)?);
    let parts = [0, 1, 2].map(|part| (part * PART as u64, PART as u64));
    let mut desk = Desk::new(context, &memory, K + 1, parts, blocks)?;
    desk.upload(context, 1, &[0; K + 1], &[])?;
    let slots = [0, 1, 2, 3].map(|number| memory.ptr::<u8>().offset(number * 3 * PART));
    let miss = |(number, &to): (usize, &DevicePtr<u8>)| ExpertMiss {
        stays_as: None,
        to,
        from: Some(
            [0, 1, 2].map(|part| &source.as_slice()[(3 * number + part) << 21 | shift..][..PART]),
        ),
    };
    let all: Vec<ExpertMiss<'_>> = slots.iter().enumerate().map(miss).take(misses).collect();
    let mut places = places.into_iter();
    let goes = |number: usize| {
        Some(ExpertReturn {
            from: [0, 1, 2].map(|part| memory.ptr::<u8>().offset((3 * (4 + number) + part) * PART)),
            to: Back(places.next()?),
            ranges: [0, 1, 2].map(|part| {
                let at = part << 21 | shift;
                at..at + PART
            }),
        })
    };
    let returns: Vec<ExpertReturn<Back>> = (0..back).filter_map(goes).collect();
    let answer = ExpertAnswer { slots: &slots, gone: &[], room: desk.fetch.room };
    let (all, returns) = (all.into_iter(), returns.into_iter());
    desk.mailbox.answer(gpu, 0, 1, &answer, all, returns, &pinned);
    let seconds =
        median_seconds(context, |_| gpu.fetch_experts(&desk.fetch, &desk.mailbox, 0, None))?;
    Ok(Measured { seconds, bytes: (misses * 3 * PART) as f64, flops: 0.0 })
}
