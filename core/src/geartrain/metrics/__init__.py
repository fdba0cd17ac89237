"""What self.log collects: the store, the reduction over an epoch, the objects of other libraries."""
