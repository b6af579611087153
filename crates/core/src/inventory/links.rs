//! How far apart the devices of a node are, and which few of them are closest together.

use crate::device::{Link, LinkKind};
use crate::ids::GpuId;

/// Sets of devices up to which every one is tried.
const EXHAUSTIVE: u64 = 5_000;

/// Distances between the devices of a node, by their positions on it.
#[derive(Debug, Clone)]
pub(crate) struct Distances {
    count: usize,
    matrix: Vec<u16>,
}

impl Distances {
    /// Distances from `links`; `None` where no link is known.
    pub fn new(links: &[Link], gpu_ids: &[GpuId]) -> Option<Self> {
        let count = gpu_ids.len();
        let mut matrix = vec![LinkKind::CrossNuma.distance(); count * count];
        let position = |gpu_id| gpu_ids.iter().position(|known| *known == gpu_id);
        let mut any = false;
        for link in links {
            if let (Some(a), Some(b)) = (position(link.a), position(link.b)) {
                any = true;
                for cell in [a * count + b, b * count + a] {
                    matrix[cell] = matrix[cell].min(link.kind.distance());
                }
            }
        }
        any.then_some(Self { count, matrix })
    }

    fn between(&self, a: usize, b: usize) -> u32 {
        u32::from(self.matrix[a * self.count + b])
    }

    fn sum(&self, positions: &[usize]) -> u32 {
        let pairs = positions.iter().enumerate().flat_map(|(i, a)| positions[i + 1..].iter().map(move |b| (*a, *b)));
        pairs.map(|(a, b)| self.between(a, b)).sum()
    }

    /// The `wanted` of the candidate positions that are closest together: least sum of distances over all pairs, lowest
    /// numbers among equals. Every set is tried where there are few; else each candidate gathers its nearest.
    pub fn closest(&self, candidates: &[usize], wanted: usize) -> Vec<usize> {
        debug_assert!(wanted <= candidates.len());
        if choices(candidates.len() as u64, wanted as u64) <= EXHAUSTIVE {
            return self.closest_of_all(candidates, wanted);
        }
        let gathered = candidates.iter().map(|&start| self.gather(start, candidates, wanted));
        gathered.min_by_key(|set| (self.sum(set), set.clone())).unwrap_or_default()
    }

    fn closest_of_all(&self, candidates: &[usize], wanted: usize) -> Vec<usize> {
        let mut chosen: Vec<usize> = (0..wanted).collect();
        let mut best: Option<(u32, Vec<usize>)> = None;
        loop {
            let set: Vec<usize> = chosen.iter().map(|&i| candidates[i]).collect();
            let sum = self.sum(&set);
            if best.as_ref().is_none_or(|(least, _)| sum < *least) {
                best = Some((sum, set));
            }
            let room = |i: usize| candidates.len() - wanted + i;
            let Some(last) = (0..wanted).rev().find(|&i| chosen[i] < room(i)) else { break };
            chosen[last] += 1;
            for i in last + 1..wanted {
                chosen[i] = chosen[i - 1] + 1;
            }
        }
        best.map(|(_, set)| set).unwrap_or_default()
    }

    fn gather(&self, start: usize, candidates: &[usize], wanted: usize) -> Vec<usize> {
        let mut set = vec![start];
        while set.len() < wanted {
            let left = candidates.iter().copied().filter(|candidate| !set.contains(candidate));
            let nearest =
                left.min_by_key(|&candidate| (set.iter().map(|&s| self.between(s, candidate)).sum::<u32>(), candidate));
            match nearest {
                Some(nearest) => set.push(nearest),
                None => break,
            }
        }
        set.sort_unstable();
        set
    }
}

/// How many ways there are to choose `k` of `n`, or a large number.
fn choices(n: u64, k: u64) -> u64 {
    (0..k.min(n - k)).try_fold(1_u64, |ways, i| Some(ways.checked_mul(n - i)? / (i + 1))).unwrap_or(u64::MAX)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn pairs(count: u32, near: &[(u32, u32)]) -> Distances {
        let gpu_ids: Vec<GpuId> = (0..count).map(GpuId).collect();
        let link = |&(a, b)| Link { a: GpuId(a), b: GpuId(b), kind: LinkKind::NvLink(4) };
        Distances::new(&near.iter().map(link).collect::<Vec<_>>(), &gpu_ids).unwrap()
    }

    #[test]
    fn two_of_four_are_the_linked_pair() {
        let distances = pairs(4, &[(0, 2), (1, 3)]);
        assert_eq!(distances.closest(&[0, 1, 2, 3], 2), [0, 2]);
        assert_eq!(distances.closest(&[0, 1, 3], 2), [1, 3]);
        assert_eq!(distances.closest(&[0, 1], 2), [0, 1]);
    }

    #[test]
    fn many_candidates_are_gathered_and_few_are_tried_all() {
        let ring: Vec<(u32, u32)> = (8..16).flat_map(|a| (8..a).map(move |b| (a, b))).collect();
        let distances = pairs(20, &ring);
        let all: Vec<usize> = (0..20).collect();
        assert_eq!(distances.closest(&all, 8), (8..16).collect::<Vec<_>>());
    }

    #[test]
    fn no_known_link_means_no_distances() {
        assert!(Distances::new(&[], &[GpuId(0), GpuId(1)]).is_none());
    }
}
