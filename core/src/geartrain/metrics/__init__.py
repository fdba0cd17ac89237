"""What self.log collects: the store, the reduction over steps and ranks, the objects of other libraries."""
