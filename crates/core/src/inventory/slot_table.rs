//! Tables of nodes and devices by number.

use std::collections::BTreeSet;
use std::ops::{Index, IndexMut};

/// Entries by number. The number of a removed entry is vacant until a new entry takes it.
///
/// A new entry takes the lowest vacant number. Numbers therefore depend only on the existing entries, so a restored
/// pool numbers the next entry as the original pool would have.
#[derive(Debug)]
pub(crate) struct SlotTable<T> {
    slots: Vec<Option<T>>,
    vacant: BTreeSet<u32>,
}

impl<T> Default for SlotTable<T> {
    fn default() -> Self {
        Self { slots: Vec::new(), vacant: BTreeSet::new() }
    }
}

impl<T> SlotTable<T> {
    /// Returns one more than the highest number that was ever used.
    pub fn span(&self) -> u32 {
        self.slots.len() as u32
    }

    pub fn len(&self) -> usize {
        self.slots.len() - self.vacant.len()
    }

    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    pub fn contains(&self, number: u32) -> bool {
        self.get(number).is_some()
    }

    pub fn get(&self, number: u32) -> Option<&T> {
        self.slots.get(number as usize)?.as_ref()
    }

    /// Returns the number that the next entry takes.
    pub fn next_number(&self) -> u32 {
        self.vacant.first().copied().unwrap_or(self.span())
    }

    /// Adds an entry at a vacant number. Unused numbers before it become vacant.
    pub fn insert(&mut self, number: u32, entry: T) {
        debug_assert!(!self.contains(number), "number {number} is taken");
        if number >= self.span() {
            self.vacant.extend(self.span()..=number);
            self.slots.resize_with(number as usize + 1, || None);
        }
        self.vacant.remove(&number);
        self.slots[number as usize] = Some(entry);
    }

    pub fn remove(&mut self, number: u32) -> Option<T> {
        let entry = self.slots.get_mut(number as usize)?.take()?;
        self.vacant.insert(number);
        Some(entry)
    }

    /// Returns all entries by rising number.
    pub fn iter(&self) -> impl Iterator<Item = (u32, &T)> {
        (0..).zip(&self.slots).filter_map(|(number, slot)| Some((number, slot.as_ref()?)))
    }

    pub fn iter_mut(&mut self) -> impl Iterator<Item = (u32, &mut T)> {
        (0..).zip(&mut self.slots).filter_map(|(number, slot)| Some((number, slot.as_mut()?)))
    }
}

impl<T> Index<u32> for SlotTable<T> {
    type Output = T;

    fn index(&self, number: u32) -> &T {
        match &self.slots[number as usize] {
            Some(entry) => entry,
            None => unreachable!("number {number} is vacant but still in use"),
        }
    }
}

impl<T> IndexMut<u32> for SlotTable<T> {
    fn index_mut(&mut self, number: u32) -> &mut T {
        match &mut self.slots[number as usize] {
            Some(entry) => entry,
            None => unreachable!("number {number} is vacant but still in use"),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_lowest_vacant_number_goes_to_the_next_entry() {
        let mut slots = SlotTable::default();
        slots.insert(3, 'd');
        assert_eq!((slots.len(), slots.span(), slots.next_number()), (1, 4, 0));
        for entry in ['a', 'b', 'c', 'e'] {
            slots.insert(slots.next_number(), entry);
        }
        assert_eq!(slots.iter().map(|(_, entry)| *entry).collect::<String>(), "abcde");
        assert_eq!((slots.remove(4), slots.remove(1), slots.remove(1)), (Some('e'), Some('b'), None));
        assert_eq!((slots.len(), slots.next_number(), slots.get(1)), (3, 1, None));
        slots.insert(1, 'x');
        assert_eq!(slots.next_number(), 4);
    }
}
