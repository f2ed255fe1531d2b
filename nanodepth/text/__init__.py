"Text becomes tokens, tokens become batches; a folder for each dataset."
