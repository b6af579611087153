//! What a partly used card is worth to the workload: the dual prices of packing it into the fewest cards.

use crate::units::Share;

const CAPACITY: usize = Share::WHOLE.0 as usize;
const TOLERANCE: f64 = 1e-9;
const ROUNDS: usize = 1_000;

/// The worth of a card with 0..=1000 thousandths free, in thousandths of an empty card; empty where there is no demand.
///
/// `demand` is how many cards' parts of each size are asked for. The linear program "the least number of cards whose
/// patterns of parts cover the demand" has a dual price for each size; a card is worth the best pattern that still fits.
/// Solved by column generation: the simplex method over the patterns so far, and a knapsack that finds the next one.
pub fn card_values(demand: &[(Share, f64)]) -> Vec<f64> {
    let demand: Vec<(usize, f64)> = demand
        .iter()
        .filter(|(size, count)| (1..=Share::WHOLE.0).contains(&size.0) && *count > 0.0)
        .map(|(size, count)| (size.0 as usize, *count))
        .collect();
    if demand.is_empty() {
        return Vec::new();
    }
    let sizes: Vec<usize> = demand.iter().map(|(size, _)| *size).collect();
    let mut simplex = Simplex::new(&sizes, &demand.iter().map(|(_, count)| *count).collect::<Vec<_>>());
    for _ in 0..ROUNDS {
        let prices = simplex.prices();
        if let Some(negative) = prices.iter().position(|price| *price < -TOLERANCE) {
            // More of a size than is asked for costs nothing: its price cannot stay below zero.
            let mut surplus = vec![0.0; sizes.len()];
            surplus[negative] = -1.0;
            simplex.enter(&surplus, 0.0);
            continue;
        }
        let (worth, pattern) = best_pattern(&sizes, &prices);
        if worth <= 1.0 + TOLERANCE {
            break;
        }
        simplex.enter(&pattern, 1.0);
    }
    let prices: Vec<f64> = simplex.prices().into_iter().map(|price| price.max(0.0)).collect();
    knapsack(&sizes, &prices).0.into_iter().map(|worth| 1000.0 * worth).collect()
}

/// The worth of every amount of free share, and the part that was added last to reach it.
fn knapsack(sizes: &[usize], prices: &[f64]) -> (Vec<f64>, Vec<Option<usize>>) {
    let mut worth = vec![0.0; CAPACITY + 1];
    let mut last = vec![None; CAPACITY + 1];
    for free in 1..=CAPACITY {
        worth[free] = worth[free - 1];
        for (i, &size) in sizes.iter().enumerate().filter(|(_, size)| **size <= free) {
            let with = worth[free - size] + prices[i];
            if with > worth[free] + 1e-12 {
                worth[free] = with;
                last[free] = Some(i);
            }
        }
    }
    (worth, last)
}

fn best_pattern(sizes: &[usize], prices: &[f64]) -> (f64, Vec<f64>) {
    let (worth, last) = knapsack(sizes, prices);
    let mut pattern = vec![0.0; sizes.len()];
    let mut free = CAPACITY;
    while free > 0 {
        match last[free] {
            Some(i) => {
                pattern[i] += 1.0;
                free -= sizes[i];
            }
            None => free -= 1,
        }
    }
    (worth[CAPACITY], pattern)
}

/// The revised simplex method on `min Σ cost·x, patterns·x = demand, x ≥ 0`, columns entering one at a time.
struct Simplex {
    rows: usize,
    /// The inverse of the basis, row by row.
    inverse: Vec<f64>,
    costs: Vec<f64>,
    values: Vec<f64>,
}

impl Simplex {
    /// Starts with one pattern per size: as many of it as fit a card.
    fn new(sizes: &[usize], demand: &[f64]) -> Self {
        let rows = sizes.len();
        let mut inverse = vec![0.0; rows * rows];
        let mut values = vec![0.0; rows];
        for (i, &size) in sizes.iter().enumerate() {
            let parts = (CAPACITY / size) as f64;
            inverse[i * rows + i] = 1.0 / parts;
            values[i] = demand[i] / parts;
        }
        Self { rows, inverse, costs: vec![1.0; rows], values }
    }

    fn prices(&self) -> Vec<f64> {
        let column = |j: usize| (0..self.rows).map(|i| self.costs[i] * self.inverse[i * self.rows + j]).sum();
        (0..self.rows).map(column).collect()
    }

    fn enter(&mut self, column: &[f64], cost: f64) {
        let row = |i: usize| &self.inverse[i * self.rows..(i + 1) * self.rows];
        let direction: Vec<f64> = (0..self.rows).map(|i| row(i).iter().zip(column).map(|(a, b)| a * b).sum()).collect();
        let ratios = (0..self.rows).filter(|&i| direction[i] > TOLERANCE);
        let Some(leaving) =
            ratios.min_by(|&a, &b| (self.values[a] / direction[a]).total_cmp(&(self.values[b] / direction[b])))
        else {
            return;
        };
        let step = self.values[leaving] / direction[leaving];
        let pivot: Vec<f64> = row(leaving).iter().map(|cell| cell / direction[leaving]).collect();
        for i in (0..self.rows).filter(|&i| i != leaving) {
            self.values[i] = (self.values[i] - step * direction[i]).max(0.0);
            for (cell, pivot) in self.inverse[i * self.rows..(i + 1) * self.rows].iter_mut().zip(&pivot) {
                *cell -= direction[i] * pivot;
            }
        }
        self.inverse[leaving * self.rows..(leaving + 1) * self.rows].copy_from_slice(&pivot);
        self.values[leaving] = step;
        self.costs[leaving] = cost;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn halves_are_worth_half_a_card_each() {
        let values = card_values(&[(Share(500), 10.0)]);
        assert!((values[499] - 0.0).abs() < 1e-6);
        assert!((values[500] - 500.0).abs() < 1e-6);
        assert!((values[999] - 500.0).abs() < 1e-6);
        assert!((values[1000] - 1000.0).abs() < 1e-6);
    }

    #[test]
    fn what_fits_only_beside_something_common_is_priced_by_what_it_displaces() {
        // 0.7 leaves 0.3, which the many 0.3 use: a card of 0.7 and 0.3 is full value; 0.3 alone comes three to a card.
        let values = card_values(&[(Share(700), 1.0), (Share(300), 100.0)]);
        assert!((values[300] - 1000.0 / 3.0).abs() < 1e-6, "{}", values[300]);
        assert!((values[700] - 2000.0 / 3.0).abs() < 1e-6, "{}", values[700]);
    }

    #[test]
    fn value_never_falls_as_more_is_free_and_an_empty_card_is_worth_one() {
        let demand: Vec<(Share, f64)> = (1..25).map(|i| (Share(i * 40), f64::from(i % 7 + 1))).collect();
        let values = card_values(&demand);
        assert!(values.is_sorted());
        assert!((values[1000] - 1000.0).abs() < 1e-3);
    }

    #[test]
    fn no_demand_has_no_values() {
        assert!(card_values(&[]).is_empty());
        assert!(card_values(&[(Share(0), 3.0), (Share(10), 0.0)]).is_empty());
    }
}
