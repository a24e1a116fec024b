//! The choice of the rows of a pass: pure and deterministic.

use forebay_ops::RowKind;

/// Limits of a pass.
#[derive(Debug, Clone, Copy)]
pub struct Limits {
    /// Most requests that run at a time.
    pub running: usize,
    /// Most rows.
    pub rows: usize,
    /// Most prompt rows beside decode rows.
    pub prompt_rows: usize,
    /// Most rows of a pass of prompt rows alone.
    pub prompt_rows_alone: usize,
    /// Most decode rows.
    pub decode_rows: usize,
    /// Most decode rows because of other callers. Each has one at least.
    pub shared_rows: usize,
    /// Most rows of callers that are ahead of others.
    pub rows_of_ahead: usize,
}

/// The next work of a running request.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Progress {
    /// So many tokens of its prompt are left.
    Reads(usize),
    /// So many tokens of its answer are known, because its grammar allows no others.
    Follows(usize),
    Generates,
    /// Its keys and values are still being copied to the device.
    Arrives,
}

/// Rows of one request in a pass.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Part {
    /// Index of the request among the running ones.
    pub index: usize,
    pub count: usize,
    pub kind: RowKind,
    /// True if the rows belong to the prompt.
    pub reads: bool,
}

/// Chooses the rows of the next pass: one for each of the first requests that generate, known tokens of others, then prompt
/// rows. Callers have equal parts of the first and the last, and those of a caller go to its requests in their order. `share` returns
/// the number of a request's caller, and `is_ahead` whether a caller has what others leave only.
pub fn choose(
    limits: &Limits,
    progress: impl Iterator<Item = Progress> + Clone,
    share: impl Fn(usize) -> u64,
    is_ahead: impl Fn(u64) -> bool,
    parts: &mut Vec<Part>,
) {
    parts.clear();
    let mut left_ahead = limits.rows_of_ahead;
    let is_ahead = |index: usize| is_ahead(share(index));
    let generating = progress.clone().enumerate().filter(|(_, of)| *of == Progress::Generates);
    let generating = generating.map(|(index, _)| (index, 1));
    let first = generating.clone().filter(|(index, _)| !is_ahead(*index));
    let callers = count_callers(first.map(|(index, _)| index), &share);
    let most = limits.decode_rows.min(limits.shared_rows.max(callers));
    let row = Part { index: 0, count: 0, kind: RowKind::Decode, reads: false };
    share_in_order(most, &mut left_ahead, generating, &share, is_ahead, row, parts);
    let mut room = limits.rows.saturating_sub(parts.len());
    for (index, of) in progress.clone().enumerate() {
        let Progress::Follows(tokens) = of else { continue };
        if is_ahead(index) {
            continue;
        }
        let count = tokens.min(room);
        if count > 0 && parts.len() < limits.decode_rows {
            parts.push(Part { index, count, kind: RowKind::Prompt, reads: false });
            room -= count;
        }
    }
    let most = if parts.is_empty() { limits.prompt_rows_alone } else { limits.prompt_rows };
    let prompts = progress.enumerate().filter_map(|(index, of)| match of {
        Progress::Reads(tokens) => Some((index, tokens)),
        _ => None,
    });
    let rows = Part { kind: RowKind::Prompt, reads: true, ..row };
    share_in_order(most.min(room), &mut left_ahead, prompts, &share, is_ahead, rows, parts);
}

/// Returns the number of callers of these requests.
pub fn count_callers(
    requests: impl Iterator<Item = usize> + Clone,
    share: impl Fn(usize) -> u64,
) -> usize {
    let is_first = |(at, index): &(usize, usize)| {
        !requests.clone().take(*at).any(|other| share(other) == share(*index))
    };
    requests.clone().enumerate().filter(is_first).count()
}

/// Adds parts like `part` for the requests, given by their indices and the rows that they want. Those that are ahead have what
/// others leave, and at most `left_ahead` rows, which are taken off.
fn share_in_order(
    most: usize,
    left_ahead: &mut usize,
    wanted: impl Iterator<Item = (usize, usize)> + Clone,
    share: impl Fn(usize) -> u64,
    is_ahead: impl Fn(usize) -> bool,
    part: Part,
    parts: &mut Vec<Part>,
) {
    let first = wanted.clone().filter(|(index, _)| !is_ahead(*index));
    let left = most - share_rows(most, first, &share, part, parts);
    let ahead = wanted.filter(|(index, _)| is_ahead(*index));
    *left_ahead -= share_rows(left.min(*left_ahead), ahead, &share, part, parts);
    parts.retain(|part| part.count > 0);
}

/// Adds a part like `part` for each of the requests, given by their indices and the rows that they want. Some parts may be empty.
/// Returns the number of rows.
fn share_rows(
    most: usize,
    wanted: impl Iterator<Item = (usize, usize)> + Clone,
    share: impl Fn(usize) -> u64,
    part: Part,
    parts: &mut Vec<Part>,
) -> usize {
    let first = parts.len();
    let all = wanted.clone().map(|(_, rows)| rows).sum();
    if all <= most {
        parts.extend(wanted.map(|(index, count)| Part { index, count, ..part }));
        return all;
    }
    let mut left = most;
    let callers = count_callers(wanted.clone().map(|(index, _)| index), &share).max(1);
    let each = (left / callers).max(1);
    for (index, rows) in wanted.clone() {
        let own = parts[first..].iter().filter(|part| share(part.index) == share(index));
        let taken: usize = own.map(|part| part.count).sum();
        let count = rows.min(each.saturating_sub(taken)).min(left);
        parts.push(Part { index, count, ..part });
        left -= count;
    }
    // What some callers do not need is for the others.
    for ((_, rows), part) in wanted.zip(&mut parts[first..]) {
        let more = (rows - part.count).min(left);
        part.count += more;
        left -= more;
    }
    most - left
}

#[cfg(test)]
mod tests {
    use super::*;

    fn limits(decode_rows: usize, shared_rows: usize) -> Limits {
        let (running, rows, prompt_rows) = (16, 20, 12);
        let (prompt_rows_alone, rows_of_ahead) = (rows, usize::MAX);
        Limits {
            running,
            rows,
            prompt_rows,
            prompt_rows_alone,
            decode_rows,
            shared_rows,
            rows_of_ahead,
        }
    }

    #[test]
    fn decode_rows_come_first_and_prompts_share_what_is_left() {
        let limits = limits(2, 2);
        let mut parts = Vec::new();
        let mut chosen = |progress: &[Progress]| {
            choose(&limits, progress.iter().copied(), |_| 0, |_| false, &mut parts);
            parts
                .iter()
                .map(|part| (part.index, part.count, part.kind == RowKind::Decode))
                .collect::<Vec<_>>()
        };
        let (reads, generates) = (Progress::Reads, Progress::Generates);
        assert_eq!(
            chosen(&[reads(10), generates, reads(10), generates]),
            [(1, 1, true), (3, 1, true), (0, 10, false), (2, 2, false)]
        );
        assert_eq!(chosen(&[reads(30), reads(1)]), [(0, 20, false)]);
        assert_eq!(chosen(&[reads(3), reads(4)]), [(0, 3, false), (1, 4, false)]);
        assert_eq!(chosen(&[generates, generates, generates]), [(0, 1, true), (1, 1, true)]);
        // Known tokens come before prompts, and count as requests that generate.
        let follows = Progress::Follows;
        assert_eq!(
            chosen(&[reads(30), follows(5), generates, follows(2)]),
            [(2, 1, true), (1, 5, false), (0, 12, false)]
        );
        assert_eq!(chosen(&[follows(30)]), [(0, 20, false)]);
        // Requests whose keys and values are still being copied have no rows.
        let arrives = Progress::Arrives;
        assert_eq!(chosen(&[arrives, generates, arrives, reads(3)]), [(1, 1, true), (3, 3, false)]);
        assert_eq!(chosen(&[]), []);
        let short = Limits { prompt_rows_alone: 7, ..limits };
        let reads = [Progress::Reads(5), Progress::Reads(5)];
        choose(&short, reads.into_iter(), |_| 0, |_| false, &mut parts);
        assert_eq!(parts.iter().map(|part| part.count).collect::<Vec<_>>(), [5, 2]);
    }

    #[test]
    fn callers_have_equal_parts_of_the_prompt_rows() {
        let limits = limits(2, 2);
        let mut parts = Vec::new();
        let mut chosen = |requests: &[(u64, usize)]| {
            let progress = requests.iter().map(|&(_, tokens)| Progress::Reads(tokens));
            choose(&limits, progress, |index| requests[index].0, |_| false, &mut parts);
            parts.iter().map(|part| (part.index, part.count)).collect::<Vec<_>>()
        };
        // The caller that came first.
        assert_eq!(chosen(&[(1, 100), (1, 100), (2, 100)]), [(0, 10), (2, 10)]);
        assert_eq!(chosen(&[(1, 4), (1, 100), (2, 100)]), [(0, 4), (1, 6), (2, 10)]);
        assert_eq!(chosen(&[(1, 100), (1, 100), (2, 3)]), [(0, 17), (2, 3)]);
        assert_eq!(chosen(&[(1, 100), (2, 3), (1, 100), (3, 100)]), [(0, 11), (1, 3), (3, 6)]);
        let many: Vec<(u64, usize)> = (0..30).map(|share| (share, 5)).collect();
        assert_eq!(chosen(&many).iter().map(|(_, count)| count).sum::<usize>(), 20);
    }

    #[test]
    fn callers_have_equal_parts_of_the_rows_that_generate() {
        let mut limits = limits(8, 4);
        let mut parts = Vec::new();
        let mut chosen = |limits: &Limits, callers: &[u64]| {
            let progress = callers.iter().map(|_| Progress::Generates);
            choose(limits, progress, |index| callers[index], |_| false, &mut parts);
            parts.iter().map(|part| part.index).collect::<Vec<_>>()
        };
        assert_eq!(chosen(&limits, &[1, 1, 1, 1, 1, 1]), [0, 1, 2, 3]);
        assert_eq!(chosen(&limits, &[1, 1, 1, 1, 1, 2]), [0, 1, 2, 5]);
        assert_eq!(chosen(&limits, &[1, 2, 1]), [0, 1, 2]);
        assert_eq!(chosen(&limits, &[1, 1, 1, 2, 2, 2, 2]), [0, 1, 3, 4]);
        // Every caller has one, also if there are more callers.
        assert_eq!(chosen(&limits, &[1, 1, 2, 3, 4, 5]), [0, 2, 3, 4, 5]);
        limits.decode_rows = 3;
        assert_eq!(chosen(&limits, &[1, 1, 1, 1, 2]), [0, 1, 4]);
    }

    #[test]
    fn callers_that_are_ahead_have_what_others_leave() {
        let mut limits = limits(8, 4);
        let mut parts = Vec::new();
        let mut chosen = |limits: &Limits, requests: &[(u64, Progress)]| {
            let progress = requests.iter().map(|of| of.1);
            choose(limits, progress, |index| requests[index].0, |share| share == 1, &mut parts);
            parts.iter().map(|part| (part.index, part.count)).collect::<Vec<_>>()
        };
        let (reads, generates, follows) = (Progress::Reads, Progress::Generates, Progress::Follows);
        let all = [(1, generates), (1, generates), (2, generates), (1, reads(9)), (2, reads(3))];
        assert_eq!(chosen(&limits, &all), [(2, 1), (0, 1), (1, 1), (4, 3), (3, 9)]);
        limits.rows_of_ahead = 5;
        assert_eq!(chosen(&limits, &all), [(2, 1), (0, 1), (1, 1), (4, 3), (3, 3)]);
        limits.rows_of_ahead = 0;
        assert_eq!(chosen(&limits, &all), [(2, 1), (4, 3)]);
        assert_eq!(chosen(&limits, &[(1, follows(3)), (1, reads(5)), (2, reads(4))]), [(2, 4)]);
    }
}
